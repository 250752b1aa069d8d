"""Every public function against arguments that it cannot take: the error names the argument and
what is expected, nothing was sent, and what was given is as it was."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import disttensor as dt
import ops
from disttensor import Partial, ProcessMesh, Replicate, Shard, pipeline, plans
from disttensor.api.create import from_fn
from disttensor.simulate import devices
from disttensor.torch_private import default_group, timeout_of
from tests.support.layouts import S0, P, R, counted, everywhere, grid, same
from tests.support.pool import on_ranks
from tests.test_public import MODULES

A_MESH, A_MODULE, A_DTYPE = "a ProcessMesh", "a module is expected", "dtype of torch"
SIZES, WHOLE, FLAG = "whole numbers from 0 up", "a whole number", "True or False"
DENSE, PLACES = "a dense tensor of torch", "Shard.dim., Replicate.. or Partial.op."

# What names the argument and what is expected in the error -> calls. ``x`` is a DistTensor, ``t`` a
# plain tensor, ``M`` a module under shard_data_parallel, ``lin()`` a plain one.
TABLE = {
    f"init_mesh: shape=.*{SIZES.replace('0', '1')}": """
        dt.init_mesh((-1, -2)) dt.init_mesh((0,)) dt.init_mesh(4) dt.init_mesh("4")
        dt.init_mesh((4.0,)) dt.init_mesh((True,)) dt.init_mesh(None)""",
    "replay: target.*a module, or a function": "dt.replay(None) dt.replay(3) dt.replay(x)",
    "capture: step.*a function": "dt.capture(None) dt.capture(3)",
    "capture: warmup.*from 3 up": "dt.capture(step,warmup=2) dt.capture(step,warmup=2.5)",
    "compile: target.*a module, or a function": "dt.compile(None) dt.compile(3) dt.compile(x)",
    "compile: backend.*a name, as 'inductor', or a function": "dt.compile(lin(), backend=3)",
    "init_mesh: dim_names=.*different names": """
        dt.init_mesh((2,2),"dp") dt.init_mesh((4,),(0,)) dt.init_mesh((4,),4)""",
    "device_type=.*a type of device that torch has": """
        dt.init_mesh((4,),device_type="tpu") dt.init_mesh((4,),device_type=3)
        ProcessMesh([0],("d",),"cpu:0") dt.Strategy(device_type="tpu")""",
    "timeout=.*a positive number of seconds": """
        dt.init_mesh((4,),timeout=-1) dt.init_mesh((4,),timeout="x")
        dt.init_mesh((4,),timeout=0)""",
    "ProcessMesh: mesh=.*ranks, which are whole numbers": """
        ProcessMesh([0.5,1]) ProcessMesh(["0","1"]) ProcessMesh([True,False]) ProcessMesh(None)
        ProcessMesh([[0],[0,1]]) ProcessMesh(torch.tensor([0.0])) ProcessMesh({0})""",
    "ProcessMesh: dim_names=.*different names": "ProcessMesh([0],'d') ProcessMesh([0],(1,))",
    "index .* of ProcessMesh": "grid()[9] grid()[None] grid()[0.5] grid()['dp',0]",
    "has no axis": "grid().axis(2) grid().axis(None) grid().axis('x') grid()['x']",
    "Shard: dim=.*a whole number": "Shard(None) Shard(True) Shard(1.0) Shard('0')",
    "Balanced: dim=.*a whole number": """
        dt.attention.Balanced(None) dt.attention.Balanced(True) dt.attention.Balanced('0')""",
    "Shard: order=.*from 0 up": "Shard(0,order='a') Shard(0,order=-1) Shard(0,order=True)",
    "Partial.*no such reduction": "Partial(None) Partial(3) Partial('mean') Partial(['sum'])",
    f"mesh=.*{A_MESH}": """
        dt.shard_tensor(t,None) dt.shard_tensor(t,"mesh",(S0,R)) dt.shard_tensor(t,[0])
        dt.reshard(x,"mesh",(S0,R)) dt.reshard(x,(S0,R)) dt.from_local(t,None,(S0,R))
        dt.api.create.from_fn(torch.ones,None,(S0,R),(4,4)) dt.zeros(4,mesh=None)
        dt.full((3,),1.0,mesh=None) dt.randperm(4,mesh=3) dt.shard_module(lin(),None)
        dt.shard_module(lin(),"m")
        dt.shard_data_parallel(lin(),"m") ops.DistSpec(None,ops.Layout(((),)),(4,),t.dtype)""",
    "layout=.*a Layout|dims are expected|has no axis 5": """
        ops.DistSpec(grid(),None,(4,),t.dtype) ops.DistSpec(grid(),ops.Layout(((),)),(4,4),t.dtype)
        ops.DistSpec(grid(),ops.Layout(((5,),)),(4,),t.dtype)
        dt.from_local(t,grid(),(S0,R),shape=(4,))
        dt.from_local(t,grid(),(S0,R),shape=(4,4,1))""",
    "a DistTensor is made by dt.shard_tensor": """
        dt.DistTensor(t) dt.DistTensor() dt.DistTensor(t,3)""",
    "shard_tensor: data=.*a tensor, an array, or numbers": """
        dt.shard_tensor("abc",grid()) dt.shard_tensor(None,grid())
        dt.shard_tensor([[1],[1,2]],grid())
        dt.reshard(None,grid())""",
    f"placements=.*{PLACES}|is no placement": """
        dt.shard_tensor(t,grid(),5) dt.shard_tensor(t,grid(),"S0")
        dt.zeros(4,mesh=grid(),placements=3)
        dt.reshard(x,grid(),7) dt.from_local(t,grid(),3)
        dt.shard_module(lin(),grid(),{"weight":None})
        dt.shard_module(lin(),grid(),{"weight":3})
        dt.shard_module(lin(),grid(),{"weight":{"tp":S0}})
        dt.Strategy().apply(lin(),plan={"weight":3})""",
    "dims_mapping=.*a list of -1, an axis|axis=.*a whole number|no axis -2": """
        dt.shard_tensor(t,grid(),dims_mapping=3) dt.shard_tensor(t,grid(),dims_mapping=["a",0])
        dt.shard_tensor(t,grid(),dims_mapping=[0.5,-1])
        dt.shard_tensor(t,grid(),dims_mapping=[-2,0])
        dt.shard_tensor(t,grid(),dims_mapping=[True,-1])
        dt.shard_tensor(t,grid(),partial_status={"dp":"sum"})""",
    "partial_status=.*a dict": "dt.shard_tensor(t,grid(),partial_status=[0])",
    A_DTYPE: """
        dt.shard_tensor(t,grid(),dtype="float32") dt.shard_tensor(t,grid(),dtype=float)
        dt.zeros(4,mesh=grid(),dtype="f") ops.DistSpec(grid(),ops.Layout(((),)),(4,),"f32")
        dt.Strategy(param_dtype="bf16") dt.Strategy(reduce_dtype=3)
        dt.shard_data_parallel(lin(),grid(),"dp",param_dtype=torch.int8)
        dt.shard_data_parallel(lin(),grid(),"dp",reduce_dtype=3)""",
    "ignored_params: a parameter of shape.*is none of Linear": """
        dt.shard_data_parallel(lin(),grid(),"dp",ignored_params=M.parameters())""",
    "shard_placement_fn.weight.=.*Shard.dim. of a parameter of 2 dims": """
        dt.shard_data_parallel(lin(),grid(),"dp",shard_placement_fn=lambda p:1)
        dt.shard_data_parallel(lin(),grid(),"dp",shard_placement_fn=lambda p:R)
        dt.shard_data_parallel(lin(),grid(),"dp",shard_placement_fn=lambda p:Shard(2))
        dt.shard_data_parallel(lin(),grid(),"dp",shard_placement_fn=lambda p:BALANCED)""",
    "shard_placement_fn: nothing is sharded": """
        dt.shard_data_parallel(lin(),grid(),None,shard_placement_fn=lambda p:S0)""",
    "floating and complex dtypes can require": """
        dt.shard_tensor(t.long(),grid(),requires_grad=True)
        dt.randperm(4,mesh=grid(),requires_grad=True)
        dt.zeros(4,mesh=grid(),dtype=torch.bool,requires_grad=True)
        dt.shard_tensor(x.long(),grid(),requires_grad=True)""",
    f"requires_grad=.*{FLAG}": """
        dt.shard_tensor(t,grid(),requires_grad="x") dt.zeros(4,mesh=grid(),requires_grad=2)""",
    "src_rank": """
        dt.shard_tensor(t,grid(),src_rank=7) dt.shard_tensor(t,grid(),src_rank=-1)
        dt.shard_tensor(t,grid(),src_rank="0") dt.shard_tensor(t,grid(),src_rank=True)
        dt.shard_tensor(x,grid(),src_rank=0)""",
    f"{FLAG} is expected": """
        dt.shard_tensor(t,grid(),check="x") dt.Strategy(offload="x")
        dt.Strategy(reshard_after_forward="x")
        dt.shard_data_parallel(lin(),grid(),"dp",offload="no")
        dt.shard_data_parallel(lin(),grid(),"dp",reshard_after_forward="no")
        dt.accumulate(M,last="no").__enter__() dt.accumulate(M,last=None).__enter__()""",
    f"is (on the meta device|torch.sparse_coo|quantized): {DENSE}": """
        dt.shard_tensor(t.to("meta"),grid(),src_rank=0) dt.shard_tensor(t.to_sparse(),grid())
        dt.shard_tensor(t.to("meta"),grid(),check=True)
        dt.api.create.from_fn(to_meta,grid(),(S0,R),(4,4))
        dt.shard_tensor(torch.quantize_per_tensor(t.float(),1.0,0,torch.qint8),grid())
        dt.from_local(t.to_sparse(),grid(),(S0,R)) dt.api.create.from_fn(sparse,grid(),(S0,R),(4,4))
        dt.local_map(to_sparse,out_placements=(S0,R))(x)""",
    "is a DistTensor: its piece on this rank": """
        dt.from_local(x,grid(),(S0,R)) dt.from_local(x,grid(),(S0,R),shape=(8,4))
        dt.local_map(gives_x,out_placements=(S0,R))(x)""",
    "is a DTensor: dt.from_dtensor": """
        dt.shard_tensor(dt.to_dtensor(x),grid()) dt.from_local(dt.to_dtensor(x),grid(),(S0,R))""",
    "local=.*a tensor of torch": "dt.from_local([1.0],grid()) dt.from_local(None,grid())",
    f"(size|shape)=.*{SIZES}": """
        dt.from_local(t,grid(),(S0,R),shape=4) dt.from_local(t,grid(),(S0,R),shape=(4,-4))
        dt.from_local(t,grid(),(S0,R),shape=(4.0,4)) dt.from_local(t,grid(),(S0,R),shape="44")
        dt.zeros(-1,mesh=grid()) dt.zeros(4,-1,mesh=grid()) dt.zeros(4.5,mesh=grid())
        dt.zeros((4.5,2),mesh=grid()) dt.zeros("4",mesh=grid()) dt.zeros(True,mesh=grid())
        dt.zeros(None,mesh=grid()) dt.zeros((2,2),3,mesh=grid()) dt.zeros(t,mesh=grid())
        dt.randn(-4,mesh=grid()) dt.randperm(-1,mesh=grid()) dt.randperm(2.5,mesh=grid())
        dt.full((-3,),1.0,mesh=grid()) dt.api.create.from_fn(torch.ones,grid(),(S0,R),-1)
        ops.DistSpec(grid(),ops.Layout(((),)),(-4,),t.dtype)""",
    "size=.*less than 2..63 elements|size=.*one whole number": """
        dt.rand(2**62,2**62,mesh=grid()) dt.randperm(2,2,mesh=grid())""",
    "(device|layout): a tensor on": """
        dt.zeros(4,mesh=grid(),device="meta") dt.ones(4,mesh=grid(),layout=torch.sparse_coo)""",
    "fn=.*a factory|fn=.*a function|from_fn: what fn gave|fn gave .3., asked for": """
        dt.api.create.from_fn(None,grid(),(S0,R),4) dt.api.create.from_fn(3,grid(),(S0,R),4)
        dt.api.create.from_fn(of_three,grid(),(S0,R),(8,4))
        dt.api.create.from_fn(a_number,grid(),(S0,R),(8,4))
        dt.local_map(3,out_placements=(S0,R))""",
    "is not a pending reduction": """
        dt.api.create.from_fn(torch.ones,grid(),(S0,P),4)
        dt.rand(4,mesh=grid(),placements=(P,P))""",
    "cannot hold its values": """
        dt.rand(4,mesh=grid(),dtype=torch.int64) dt.randn(4,mesh=grid(),dtype=torch.bool)""",
    "fill_value=.*a number": """
        dt.full((2,),'a',mesh=grid()) dt.full((2,),None,mesh=grid()) dt.full((2,),x,mesh=grid())""",
    "simulate: .*(a function that|a number|list of ranks|devices.(Device|Network)) ": """
        dt.simulate.simulate(3,8) dt.simulate.simulate(None,8)
        dt.simulate.simulate(step,0) dt.simulate.simulate(step,"8")
        dt.simulate.simulate(step,8,ranks=[8]) dt.simulate.simulate(step,8,ranks=3)
        dt.simulate.simulate(step,8,ranks=["0"])
        dt.simulate.simulate(step,8,device="h100") dt.simulate.simulate(step,8,network=8)
        dt.simulate.simulate(step,8,values="x")""",
    "simulate: (measured=.*a result of dt.simulate.measure|device=.*because the measured)": """
        dt.simulate.simulate(step,8,measured=3)
        dt.simulate.simulate(step,8,measured=dt.simulate.measured.Measured({}))""",
    "measure: .*(a function that|a number of|list of ranks)": """
        dt.simulate.measure(3,8) dt.simulate.measure(step,0) dt.simulate.measure(step,8,[8])
        dt.simulate.measure(step,8,[]) dt.simulate.measure(step,8,3)
        dt.simulate.measure(step,8,steps=0)""",
    "plan_strategy: .*(a function of|a number of|a list of strategies|one strategy at least)": """
        dt.simulate.plan_strategy(3,8) dt.simulate.plan_strategy(step,0)
        dt.simulate.plan_strategy(step,8,3) dt.simulate.plan_strategy(step,8,[3])
        dt.simulate.plan_strategy(step,8,[])
        dt.simulate.plan_strategy(step,8,memory=-1)""",
    "seed=.*a whole number": """
        dt.manual_seed('a') dt.manual_seed(1.5) dt.manual_seed(None) dt.manual_seed(True)""",
    "the policies are": """
        dt.random.rng('x') dt.random.rng(None) dt.attention.policy('x') dt.attention.policy(None)
        dt.attention.policy(['ring'])""",
    "Strategy: attention=.*it is one of": "dt.Strategy(attention='x') dt.Strategy(attention=None)",
    "seconds=.*a positive number": """
        dt.debugging.compare_ranks(seconds='x') dt.debugging.compare_ranks(seconds=-1)""",
    "a torch DataLoader|(mesh|placements)=.*one for all tensors": """
        dt.shard_loader(3,grid(),(S0,R)) dt.shard_loader(LOADER,None,(S0,R))
        dt.shard_loader(LOADER,grid(),3) dt.shard_loader(LOADER,grid(),None)""",
    "what=.*a Timeline or a Schedule|events=.*a list of events": """
        pipeline.plot(3,"a.svg") pipeline.Timeline(3)""",
    "backend=.*(a name|is there already)|timeout=.*is there already": """
        dt.init_mesh((4,),backend=3) dt.init_mesh((W,),backend="mpi")
        dt.init_mesh((W,),timeout=7.5)""",
    "Checkpointer.(save|load): step=.*a whole number": """
        dt.Checkpointer("a").save(350.0) dt.Checkpointer("a").save(-1)
        dt.Checkpointer("a").save(True) dt.Checkpointer("a").save("1")
        dt.Checkpointer("a").save(None) dt.Checkpointer("a").load(1.0)
        dt.Checkpointer("a").load(-1) dt.Checkpointer("a").load(True)""",
    "Checkpointer.save: background=.*True or False": """
        dt.Checkpointer("a").save(1,background="no") dt.Checkpointer("a").save(1,background=1)""",
    "max_shard_size=.*a whole number of bytes|names=.*a dict of names": """
        dt.pretrained.save(lin(),"a",max_shard_size=5e9)
        dt.pretrained.save(lin(),"a",max_shard_size=0)
        dt.pretrained.save(lin(),"a",max_shard_size=True)
        dt.pretrained.save(lin(),"a",max_shard_size="5XB")
        dt.pretrained.save(lin(),"a",max_shard_size=None)
        dt.pretrained.save(lin(),"a",names=3)""",
    "src_rank=0 of data in a graph": "dt.shard_tensor(h,grid(),(S0,R),src_rank=0)",
    "(folder|files)=.*a path|keep=.*a whole number from 1 up": """
        dt.Checkpointer(3) dt.Checkpointer("a",keep=0) dt.Checkpointer("a",keep="2")
        dt.pretrained.save(lin(),3) dt.pretrained.load(lin(),3)""",
    "no argument is a DistTensor": """
        dt.debugging.explain(torch.relu,t) dt.local_map(torch.sin,out_placements=(S0,R))(t)""",
    "(in|out|in_grad)_placements=.*placements, or a list": """
        dt.local_map(torch.sin,out_placements=3)
        dt.local_map(torch.sin,in_placements=3,out_placements=(S0,R))
        dt.local_map(torch.sin,out_placements=(S0,R),in_grad_placements=3)""",
    "(tokens|indices|weights)=.*a tensor|(num_experts|capacity)=.*from 1 up|dispatched=": """
        dt.experts.dispatch_tokens(3,t,2) dt.experts.dispatch_tokens(t,None,2)
        dt.experts.dispatch_tokens(t,t.long(),0)
        dt.experts.dispatch_tokens(t,t.long(),2,capacity=0)
        dt.experts.dispatch_tokens(t,t.long(),"2") dt.experts.combine_tokens(t,t)
        dt.experts.combine_tokens(dt.experts.dispatch_tokens(t,t.long(),2),3)""",
    "plans.experts: (mesh_axis[:=].*|no module of this)": """
        dt.plans.experts(lin(),0) dt.plans.experts(lin(),"ep") dt.plans.experts(lin(),None)
        dt.plans.experts(lin(),-1)""",
    A_MODULE: """
        dt.experts.expert_load(3) dt.plans.experts(3,0)
        dt.pretrained.save(3,"a") dt.pretrained.load(3,"a") dt.pipeline.never_skip(3)
        dt.pipeline.skip(3)
        dt.plans.megatron(3,0) dt.shard_module(3,grid())
        dt.shard_data_parallel(3,grid())
        dt.accumulate(3,last=True).__enter__() dt.Strategy().apply(3)
        pipeline.split(["x"],[grid()],of=3)""",
    "plan=.*a dict": """
        dt.shard_module(lin(),grid(),[("weight",(S0,R))]) dt.shard_module(lin(),grid(),"weight")
        dt.Strategy().apply(lin(),plan=[3]) pipeline.split([lin()],[grid()],[3])""",
    "init=.*a function of a module": """
        dt.shard_module(lin(),grid(),init=3) dt.Strategy().apply(lin(),init=3)
        pipeline.split([lin()],[grid()],init=3)""",
    "a module, a tensor or an iterable|iterable of tensors|modules and lists of tensors": """
        dt.sync_gradients(3) dt.sync_gradients(None) dt.clip_grad_norm_(3,1.0)
        dt.clip_grad_norm_([3],1.0) dt.debugging.check_replicas(3)
        dt.debugging.check_replicas(None)""",
    "(max_norm|norm_type|forward)=.*a number": """
        dt.clip_grad_norm_([x],"a") dt.clip_grad_norm_([x],None) dt.clip_grad_norm_([x],1.0,"x")
        pipeline.gpipe(1,1).ticks("a")""",
    "a torch.amp.GradScaler is expected": "dt.optim.shard_scaler(3) dt.optim.shard_scaler(None)",
    "a torch DTensor is expected|a DistTensor is expected": """
        dt.from_dtensor(t) dt.from_dtensor(x) dt.to_dtensor(t) dt.to_dtensor(None)""",
    "megabytes=.*a positive size": """
        dt.fsdp.SegmentBySize("a") dt.fsdp.SegmentBySize(-1)
        dt.fsdp.SegmentBySize(None) dt.fsdp.SegmentBySize(True)""",
    "list of names of modules|the name of a module|is no name of a module|given twice": """
        dt.fsdp.SegmentByAnchors("x") dt.fsdp.SegmentByAnchors([3]) dt.fsdp.SegmentByAnchors(3)
        dt.fsdp.SegmentByAnchors(["a","a"]) dt.Strategy(recompute=3) dt.Strategy(recompute=[3])
        dt.Strategy(segments=3) dt.Strategy(segments="x") dt.Strategy(segments=[3])
        dt.shard_data_parallel(lin(),grid(),"dp",segments=3)""",
    "a (whole )?number of (processes|segments)": """
        dt.Strategy(dp=0) dt.Strategy(dp=-1) dt.Strategy(tp="2") dt.Strategy(pp=2.0)
        dt.Strategy(cp=True)
        dt.Strategy().degrees(0) dt.Strategy().degrees(-4) dt.Strategy().degrees("4")
        dt.Strategy().degrees(4.0) dt.Strategy().groups(0) dt.Strategy(prefetch=-1)
        dt.Strategy(prefetch="a") dt.shard_data_parallel(lin(),grid(),"dp",prefetch=-1)
        dt.shard_data_parallel(lin(),grid(),"dp",prefetch=1.5)""",
    "(accumulate_steps|visits|micro_batch|sequence|stage|counts: entry)=.*a whole number": """
        dt.Strategy(accumulate_steps=0) dt.Strategy(accumulate_steps=None)
        dt.Strategy().batch(sequence="x") dt.Strategy().batch(True) dt.Strategy().batch(1.5)
        dt.Strategy().apply(lin(),visits=0) dt.Strategy().apply(lin(),visits="x")
        dt.Strategy().accumulate(M,-1) dt.Strategy().accumulate(M,"0")
        dt.Strategy().accumulate(M,0.5)
        pipeline.gpipe(1,1).peak("a") pipeline.split([lin()],[grid()],counts=["a"])""",
    "stage=.*the parameters too|zero_stage=.*parameters too": """
        dt.Strategy(zero_stage=4) dt.Strategy(zero_stage=True)
        dt.shard_data_parallel(lin(),grid(),"dp",stage=True)""",
    "amp=.*'bf16' or 'fp16'": "dt.Strategy(amp='fp8') dt.Strategy(amp=torch.bfloat16)",
    "a list of layers|a list of meshes|stages are meshes|a list of whole numbers": """
        pipeline.split(3,[grid()]) pipeline.split([lin()],grid()) pipeline.split([lin()],None)
        pipeline.split([lin()],[3]) pipeline.split([lin()],[grid()],counts=3)
        pipeline.run(step,[1.0],stages=3) pipeline.run(step,[1.0],stages=grid())""",
    "balance=.*one cost, not negative, for each of 1 layers": """
        pipeline.split([lin()],[grid()],balance=[1.0, 2.0])
        pipeline.split([lin()],[grid()],balance=[-1.0])""",
    "balance=.*'parameters', 'time' or a list": """
        pipeline.split([lin()],[grid()],balance="x")
        pipeline.split([lin()],[grid()],balance="parameters",counts=[1])""",
    "stages: entry=.*a ProcessMesh": "pipeline.run(step,[1.0],stages=[3])",
    "step=.*a function|micro_batches=.*an iterable|no schedule|is no schedule": """
        pipeline.run(3,[1.0]) pipeline.run(step,3) pipeline.run(step,None)
        pipeline.run(step,[1.0],schedule="x") pipeline.run(step,[1.0],schedule=3)
        pipeline.run(step,[1.0],schedule=None)""",
    "a schedule: (stages|micro_batches|chunks)=.*from 1 up": """
        pipeline.gpipe(0,1) pipeline.gpipe(1,0) pipeline.gpipe(1.5,1) pipeline.gpipe(True,1)
        pipeline.one_f_one_b(-1,1) pipeline.interleaved_1f1b(1,1,0) pipeline.zero_bubble(0,1)
        pipeline.interleaved_zero_bubble(1,0,2) pipeline.zbv("2",1) pipeline.dualpipev(1,True)
        pipeline.search(pipeline.Costs(1,1,1),stages=0,micro_batches=1)""",
    "no schedule 'x'|visits: stages.*a list of meshes|times=.*from 1 up": """
        pipeline.visits([grid()],"x") pipeline.visits(3,"zbv") pipeline.visits(None,"1f1b")
        pipeline.visits([grid()],"zbv",0)""",
    "Costs: (forward|transfer)=.*a number|Costs.of: timeline=.*a Timeline|costs=.*Costs": """
        pipeline.Costs("a",1,1) pipeline.Costs(None,1,1) pipeline.Costs(1,1,1,"x")
        pipeline.Costs.of(3) pipeline.search(3,stages=1,micro_batches=1)""",
    "memory=.*a whole number": """
        pipeline.search(pipeline.Costs(1,1,1),0,stages=1,micro_batches=1)
        pipeline.search(pipeline.Costs(1,1,1),"a",stages=1,micro_batches=1)""",
    "orders=.*an order for each stage|order of stage 0=.*actions": """
        pipeline.Schedule(3) pipeline.Schedule([3])""",
}  # fmt: skip
CALLS = [
    (pattern, call)
    for pattern, calls in TABLE.items()
    for call in re.split(
        r"\s+(?=dt\.|ops\.|Shard|Partial|ProcessMesh|grid|pipeline)", calls.strip()
    )
]

# By parameter: a call that works -> parameter -> values that it cannot take, each in its place.
COUNT, LEAST, FLAGS, WORD = "0 -1 1.5 True '2'", "-1 1.5 True '2'", "1 'no'", "3 'nonsense' ['a']"
MESH, MODULE, PLACED = "3 'm' [0]", "None 3 'm' t", "3 'S0' (S0,3) (S0,R,R)"
DTYPE, MAPPING, PARTIAL = "'float32' float 3", "3 ['a'] [0.5]", "3 [0] {'dp':3} {5:'sum'}"
FUNCTION, AXIS, PLAN = "None 3 'x'", "None -1 0.5 ['a'] True", "3 'weight' [3]"
DEVICE, TIME, DIM = "3 'nonsense'", "'x' -1 True", "None True '0' 0.5"
FULL = {"mesh": f"None {MESH}", "placements": PLACED, "dtype": DTYPE, "requires_grad": FLAGS}
MADE = {"size": "(-1,) (1.5,) ('4',) (True,) (t,)", **FULL,
        "kwargs": "{'nonsense':1} {'device':'meta'}"}  # fmt: skip
MAKER = dict.fromkeys(("stages", "micro_batches", "chunks"), COUNT)
DATA_PARALLEL = {"reshard_after_forward": FLAGS, "prefetch": LEAST, "offload": FLAGS,
                 "param_dtype": DTYPE, "reduce_dtype": DTYPE}  # fmt: skip
TICKS = {"forward": "None 'x' -1", "backward": "None 'x' -1", "weights": "'x' -1 3"}
DEGREES = "dp", "sharding", "tp", "cp", "pp", "accumulate_steps"
BAD: dict[str, dict[str, str]] = {
    "dt.attention.Balanced(0)": {"dim": DIM, "order": "'a' -1 True 0.5"},
    "dt.Shard(0)": {"dim": DIM, "order": "'a' -1 True 0.5"},
    "dt.Partial()": {"reduce_op": WORD},
    "dt.Checkpointer('a')": {"folder": "3 None []", "keep": COUNT},
    "dt.Checkpointer('a').save(1)": {"step": f"None {LEAST}", "background": f"None {FLAGS}"},
    "dt.Checkpointer('a').load()": {"step": LEAST},
    "ops.DistSpec(grid(),ops.Layout(((),)),(4,),t.dtype)": {
        "mesh": f"None {MESH}", "layout": "None ((),) S0", "shape": "4 (-4,) (4.0,) '4'",
        "dtype": f"None {DTYPE}"},
    "dt.ProcessMesh([0],('d',))": {
        "mesh": "None 'x' [0.5] [-1] [0,0] []", "dim_names": "'d' (1,) ('a','b') 3",
        "device_type": DEVICE},
    "dt.fsdp.SegmentByAnchors(('a',))": {"names": "'x' [3] 3 None ['a','a']"},
    "dt.fsdp.SegmentBySize()": {"megabytes": "'x' -1 0 True None"},
    "dt.Strategy()": {
        **dict.fromkeys(DEGREES, COUNT), **DATA_PARALLEL, "schedule": WORD,
        "segments": "3 'x' [3]", "attention": f"None {WORD}", "amp": WORD,
        "recompute": "3 [3] None", "zero_stage": "0 4 -1 True '3'", "device_type": DEVICE},
    "dt.Strategy.from_sharding_configs({})": {
        "configs": "None 3 'x' {'a':1}", "more": "{'nonsense':1}"},
    "dt.Strategy().degrees()": {"world": COUNT}, "dt.Strategy().groups()": {"world": COUNT},
    "dt.Strategy().batch()": {"sequence": "1.5 True 'x'"},
    "dt.Strategy().apply(seq())": {
        "model": MODULE, "optimizer": "3 'x'", "plan": PLAN, "layers": "3 [3] ['nonsense']",
        "counts": "3 ['a'] [2] [-1]", "balance": "3 'x' [1.0,2.0]", "sample": "t",
        "visits": "0 'x' 1.5 True [3]", "init": "3 'x'"},
    "dt.Strategy().apply(lin())": {"counts": "[1]", "balance": "'parameters'", "sample": "t"},
    "dt.Strategy().accumulate(M,0)": {"model": MODULE, "micro_batch": f"None {LEAST}"},
    "dt.Strategy().scaler(device='cpu')": {"options": "{'nonsense':1}"},
    "dt.accumulate(M,True)": {
        "module": MODULE, "last": f"None {FLAGS}", "reduce": f"None {WORD}"},
    "dt.attention.policy('ring')": {"policy": f"None {WORD}"},
    "dt.debugging.check_replicas(M)": {"module_or_tensors": "None 3 [3] 'x'"},
    "dt.clip_grad_norm_([x],1.0)": {
        "parameters": "None 3 [3] 'x'", "max_norm": "'x' None", "norm_type": "'x' None",
        "error_if_nonfinite": f"None {FLAGS}", "foreach": FLAGS},
    "dt.experts.combine_tokens(dt.experts.dispatch_tokens(t,t.long()%2,2),t)": {
        "dispatched": "None 3 t", "weights": "None 3 t[:1] 'x'"},
    "dt.debugging.compare_ranks()": {"seconds": f"None 0 {TIME}"},
    "dt.experts.dispatch_tokens(t,t.long()%2,2)": {
        "tokens": "None 3 t[0]", "indices": "None 3 t t.long()[:1]",
        "num_experts": f"None {COUNT}", "capacity": COUNT},
    **{
        f"dt.{name}(4,mesh=grid())": MADE
        for name in ("empty", "ones", "rand", "randn", "randperm", "zeros")
    },
    "dt.full((4,),1.0,mesh=grid())": {
        **FULL, "size": "(-1,) 1.5 '4' (True,) None", "fill_value": "None 'x' x"},
    "dt.experts.expert_load(lin())": {"model": MODULE},
    "dt.debugging.explain(torch.relu,x)": {"func": FUNCTION},
    "dt.debugging.pieces(x)": {"x": "None 3 t"},
    "dt.launch(step,2)": {
        "fn": FUNCTION, "nprocs": COUNT, "args": "None 3 'x'", "timeout": "0 -1 'x'",
        "start_method": "3 'x' 'forkserver'"},
    "dt.local_ranks(2)": {"nprocs": COUNT, "output": "None 3 'some'"},
    "dt.verify(step,2)": {
        "fn": FUNCTION, "nprocs": COUNT, "args": "None 3 'x'", "steps": COUNT, "whole": "3 'x'",
        "dtype": "3 'x' torch.int64", "timeout": "0 -1 'x'"},
    "dt.watch(3)": {"seconds": f"None 0 {TIME}"},
    "dt.from_dtensor(dt.to_dtensor(x))": {"x": "None 3 t x"},
    "dt.api.create.from_fn(torch.ones,grid(),(S0,R),(4,))": {
        **FULL, "kwargs": MADE["kwargs"], "fn": FUNCTION, "shape": "-1 (1.5,) '4' True None t",
        "dims_mapping": MAPPING},
    "dt.from_local(t,grid(),(S0,R))": {
        "run_check": f"None {FLAGS}", "grad_placements": "3 'S0' (S0,) (P,P)",
        "local": "None 3 [1.0] x", "mesh": f"None {MESH}", "placements": PLACED,
        "shape": "4 (4,-4) (4.0,4) '44'", "dims_mapping": MAPPING, "partial_status": PARTIAL},
    "dt.init_mesh((W,))": {
        "shape": "None 4.0 '4' (0,) (-1,-1) (True,)", "dim_names": "'d' (1,) ('a','b','c') 3",
        "device_type": DEVICE, "backend": "3 'nonsense'", "timeout": f"0 {TIME}"},
    "dt.pretrained.load(lin(),'nowhere')": {
        "model": MODULE, "files": "None 3 [3]", "mesh": MESH, "plan": PLAN, "names": "3 'x' [1]",
        "strict": f"None {FLAGS}", "init": "3 'x'"},
    "dt.publish(lin(),'127.0.0.1:0')": {
        "model": MODULE, "address": "None 3 'x' 'x:' 'x:99999'", "dtype": DTYPE,
        "timeout": f"0 {TIME}"},
    "dt.receive(lin(),'127.0.0.1:1')": {
        "model": MODULE, "address": "None 3 'x' ':1' 'x:-1'", "names": "3 'x' [1]",
        "strict": f"None {FLAGS}", "timeout": f"0 {TIME}"},
    "dt.local_map(torch.relu,out_placements=(S0,R))": {
        "fn": FUNCTION, "in_placements": "3 'x'", "out_placements": "3 'x'",
        "in_grad_placements": "3 'x'", "out_shapes": "3 'x' (4,-4) (4.0,)", "device_mesh": MESH},
    "dt.local_map(torch.relu,out_placements=[(S0,R)])": {"out_shapes": "3 [(4,),(4,)] [(-1,)]"},
    "dt.manual_seed(0)": {"seed": "None 1.5 True 'x'"},
    "dt.pipeline.never_skip(lin())": {"module": MODULE},
    "dt.pipeline.skip(lin())": {"module": MODULE},
    "dt.simulate.measure(step,8)": {
        "build": FUNCTION, "world": COUNT, "ranks": "3 [8] ['0'] []", "steps": COUNT},
    "dt.simulate.plan_strategy(step,8)": {
        "build_with": FUNCTION, "world": COUNT, "candidates": "3 'x' [3] []",
        "device": "None 'h100' 3", "network": "None 8 'x'", "memory": "'x' -1 0 True",
        "values": "'x' None", "like": "None 3 'x'", "most": f"None {COUNT}", "progress": "3 'x'"},
    "dt.capture(step)": {
        "step": "None 3 'x' t", "warmup": "2 -1 2.5 'x'", "check": f"None {FLAGS}"},
    "dt.compile(lin())": {"target": "None 3 'x' t", "backend": "3 None"},
    "dt.replay(lin())": {"target": "None 3 'x' t"},
    "dt.reshard(x,grid(),(S0,R))": {
        "x": "None 'x'", "mesh": MESH, "placements": PLACED, "dims_mapping": MAPPING,
        "partial_status": PARTIAL},
    "dt.random.rng('global')": {"policy": f"None {WORD}"},
    "dt.arange(4,mesh=grid())": {
        "start": "'x' [1] None", "end": "'x' [1]", "step": "'x' [1] None", **FULL},
    "dt.randint(1,4,(2,),mesh=grid())": {
        "low": "None 'x' 0.5 True", "high": "None 'x' 0.5 1 True", "size": "(-1,) (1.5,) 'x'",
        "mesh": f"None {MESH}", "placements": PLACED, "dtype": DTYPE},
    "dt.distribute_tensor(t,grid(),(S0,R))": {
        "tensor": "None 'abc' [[1],[1,2]]", "device_mesh": MESH, "placements": PLACED,
        "src_data_rank": "7 -1 '0' True 0.5"},
    "dt.fully_shard(lin(),mesh=grid())": {
        "module": MODULE, "mesh": MESH, "reshard_after_forward": f"None {FLAGS}",
        "shard_placement_fn": "3 S0", "mp_policy": "3 {0:3}", "ignored_params": "3 ['weight'] [t]",
        "segments": "3 'x' [3]"},
    "dt.replicate(lin(),mesh=grid()['dp'])": {
        "module": MODULE, "mesh": f"{MESH} grid()", "mp_policy": "3 {0:3}",
        "ignored_params": "3 ['weight'] [t]"},
    "x.redistribute()": {
        "device_mesh": MESH, "placements": PLACED, "async_op": f"None {FLAGS}",
        "forward_dtype": DTYPE, "backward_dtype": DTYPE},
    "F.unshard()": {"async_op": f"None {FLAGS}"},
    "F.set_is_last_backward(True)": {"is_last_backward": f"None {FLAGS}"},
    **{
        f"F.set_{name}(True)": {name: f"None {FLAGS}", "recurse": f"None {FLAGS}"}
        for name in (
            "requires_gradient_sync", "requires_all_reduce", "reshard_after_forward",
            "reshard_after_backward", "reduce_scatter_unused_params",
        )
    },
    "F.set_force_sum_reduction_for_comms(True)": {"enable": f"None {FLAGS}"},
    "F.set_reduce_scatter_max_input_buffers(1)": {
        "max_input_buffers": f"None {COUNT}", "recurse": f"None {FLAGS}"},
    **{
        f"F.set_modules_to_{way}_prefetch([])": {"modules": "None 3 [lin()] 'x'"}
        for way in ("forward", "backward")
    },
    "F.set_gradient_divide_factor(2)": {"factor": "None 0 -1 'x'"},
    "F.set_custom_all_gather(COMM)": {"comm": "None 3 step"},
    "F.set_custom_reduce_scatter(COMM)": {"comm": "None 3 step"},
    "F.set_post_optim_event(torch.Event())": {"event": "None 3 'x'"},
    "F.set_all_reduce_hook(print)": {"hook": "None 3 'x'"},
    "F.set_unshard_in_backward(True)": {"unshard_in_backward": f"None {FLAGS}"},
    "F.set_separate_reduce_scatter_group()": {
        "enable": f"None {FLAGS}", "recurse": f"None {FLAGS}"},
    "F.set_allocate_memory_from_process_group_for_comm(True)": {"enable": f"None {FLAGS}"},
    "F.set_symm_mem_for_comm()": {"backend": "None 3 'x'"},
    "dt.pretrained.save(lin(),'a')": {
        "model": MODULE, "folder": "None 3 []", "max_shard_size": "None 0 -1 5e9 True '5XB'",
        "names": "3 'x' [1]"},
    "dt.shard_data_parallel(lin(),grid(),'dp')": {
        **DATA_PARALLEL, "module": MODULE, "mesh": MESH, "shard_axis": WORD,
        "replicate_axis": f"{WORD} 'dp'", "stage": "0 4 True '3' None",
        "segments": "3 'x' [3] [[3]] [[]] [['weight']]",
        "ignored_params": "3 t None ['weight'] [t]", "shard_placement_fn": "3 S0",
        "mp_policy": "3 torch.bfloat16 {'':dt.Strategy()} {0:3} {'nonsense':3}"},
    "dt.shard_loader(LOADER,grid(),(S0,R))": {
        "loader": "None 3 [t]", "mesh": f"None {MESH}", "placements": f"None {PLACED}",
        "load_once": f"None {FLAGS}"},
    "dt.shard_module(lin(),grid())": {
        "module": MODULE, "mesh": f"None {MESH}", "plan": PLAN, "init": "3 'x'"},
    "dt.from_pretrained(lin())": {
        "model": "None 3 [lin()]", "strategy": "3 'dp' {}", "dtype": "3 'f32'"},
    "dt.integrations.lightning_strategy(dt.Strategy())": {"strategy": "None 3 'dp'"},
    "dt.integrations.one_process()": {"device_type": "'tpu' 3"},
    "dt.integrations.shard_accelerator(lin(),dt.Strategy())": {
        "accelerator": "None 3 lin()", "strategy": "None 3 'dp'"},
    "dt.integrations.shard_trainer(lin(),dt.Strategy())": {
        "trainer": "None 3 lin()", "strategy": "None 3 'dp'"},
    "dt.optim.own(torch.optim.SGD([t],lr=0.1))": {"optimizer": "None 3 t", "choose": FUNCTION},
    "dt.optim.shard_scaler(torch.amp.GradScaler('cpu'))": {"scaler": "None 3 t"},
    "dt.shard_tensor(t,grid(),(S0,R))": {
        "data": "None 'abc' [[1],[1,2]]", "mesh": f"None {MESH}", "placements": PLACED,
        "dims_mapping": MAPPING, "partial_status": PARTIAL, "dtype": DTYPE,
        "requires_grad": FLAGS, "src_rank": "7 -1 '0' True 0.5", "check": FLAGS},
    "dt.simulate.simulate(step,8)": {
        "build": FUNCTION, "world": COUNT, "ranks": "3 [8] ['0'] []", "device": "None 'h100' 3",
        "network": "None 8 'x'", "values": "'x' None", "measured": "3 'x' {}"},
    "dt.sync_gradients(M)": {"params": "(3,) (None,) ('x',)"},
    "dt.to_dtensor(x)": {"x": "None 3 t"},
    "pipeline.Costs(1,1,1)": {
        **dict.fromkeys(("forward", "inputs", "weights"), "None 'x' -1 [1,'a'] []"),
        "transfer": "None 'x' -1"},
    "pipeline.Schedule(['F0 B0'])": {
        "orders": "None 3 'F0' [3] ['X0'] []", "shape": f"None {WORD}"},
    "pipeline.Timeline([])": {"events": "None 3 'x' [3]", "unit": "None 3"},
    **{
        f"pipeline.{name}(1,1,2)": MAKER
        for name in ("gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
    },
    **{f"pipeline.{name}(1,1)": MAKER for name in ("one_f_one_b", "zero_bubble")},
    "pipeline.named('gpipe',1,1)": {**MAKER, "schedule": f"None {WORD}"},
    "pipeline.plot(pipeline.gpipe(1,1),'nowhere/a.svg')": {
        "what": "None 3 'x'", "path": "3 None 'a.xyz' []", "title": "3"},
    "pipeline.run(step,[1.0])": {
        "step": FUNCTION, "micro_batches": "None 3 'x' []", "schedule": f"None {WORD}",
        "stages": "3 [3] []"},
    "pipeline.search(pipeline.Costs(1,1,1),stages=1,micro_batches=1)": {
        **MAKER, "costs": "None 3", "memory": "'a' 0 -1 1.5 [1,2] ['a']",
        "shape": f"None {WORD}"},
    "pipeline.split([lin()],[grid()])": {
        "modules": "None 3 'x' [3] []", "stages": "None 3 [3] []", "plan": PLAN, "of": "3 'x'",
        "counts": "3 ['a'] [-1] [2] [1,1]", "balance": "3 'x' [-1.0] [1.0,2.0] ['a']",
        "sample": "t", "init": "3 'x'"},
    "pipeline.visits([grid()],'zbv')": {
        "stages": "None 3 [3]", "schedule": f"None {WORD}", "times": f"None {COUNT}"},
    "pipeline.gpipe(1,1).peak(0)": {"stage": "None 'x' 0.5 True 1 -1"},
    **{f"pipeline.gpipe(1,1).{name}()": TICKS for name in ("ticks", "bubble")},
    "pipeline.Timeline.of(pipeline.gpipe(1,1))": {**TICKS, "schedule": "None 3 'gpipe'"},
    **{
        f"pipeline.Timeline([]).{name}(0)": {"rank": "None 'x' 0.5"}
        for name in ("busy", "pieces", "waits")
    },
    "pipeline.Timeline([]).to_chrome_trace('nowhere/a')": {"path": "3 None []"},
    "pipeline.Costs.of(pipeline.Timeline.of(pipeline.gpipe(1,1)))": {
        "timeline": "None 3", "transfer": "None 'x' -1"},
    "pipeline.Costs(1,1,1).span(pipeline.gpipe(1,1))": {"schedule": "None 3 'gpipe'"},
    "grid().axis(0)": {"name": "None 'x' 0.5 7 -3 True"},
    "ProcessMesh.from_device_mesh(grid().to_device_mesh())": {"mesh": "None 3 'x'"},
    "x.full_tensor()": {
        "everywhere": f"None {FLAGS}", "grad_placements": "3 'S0' (S0,) (S0,P)"},
    "x.to_local()": {
        "grad_axes": "'x' 7 0.5 ['x'] [True]", "grad_placements": "3 'S0' (S0,) (P,P)"},
    "plans.experts(lin(),0)": {"model": MODULE, "mesh_axis": AXIS, "mesh": MESH},
    "plans.megatron(lin(),0)": {"model": MODULE, "mesh_axis": AXIS, "mesh": MESH},
    "devices.Device(name='d',peak={torch.float32:1e12},bandwidth=1e9)": {
        "name": "None 3", "peak": "None 3 {'f':1.0} {torch.float32:-1}",
        **dict.fromkeys(("bandwidth", "efficiency", "sharing"), "None 'x' 0 -1"),
        **dict.fromkeys(("launch", "visit", "post", "gradient"), "None 'x' -1"),
        "memory": "'x' 0 -1", "type": "None 3 'gpu'",
        "tiles": "None 3 (1,) (0,1) ('a',1)",
        "kernels": "None 3 {'a':1.0} {('a',torch.float32):-1}"},
    "dt.fsdp.unshard(M)": {"module": MODULE},
    "dt.visualize(lin(),plan={},mesh=grid())": {
        "x": "None 3 'x'", "plan": PLAN, "mesh": f"{MESH} None {{}} {{'dp':0}} {{0:2}}",
        "strategy": "3 'x'", "world": "0 2 'x'", "layers": "3 ['a']"},
    "dt.visualize((4,4),mesh=grid())": {"x": "True (-1,) (1.5,)", "plan": PLACED},
    "dt.visualize(lin(),strategy=dt.Strategy())": {
        "strategy": "3 'x'", "world": "0 'x' 1.5", "layers": "3 ['a']"},
    "devices.Link(1e9,1e-6)": {"bandwidth": "None 'x' 0 -1", "latency": "None 'x' -1"},
    "devices.Network()": {
        "ranks_per_node": f"None {COUNT}", "within": "None 3", "between": "None 3",
        "processor": "3"},
}  # fmt: skip
# Parameters that an error names by another word: that of the function which checks them.
WORDS = {
    "from_fn: shape": "size", "reshard: x": "data", "shard_data_parallel: shard_axis": "axis",
    "shard_data_parallel: replicate_axis": "(replicate_)?axis", "Schedule: orders": "order|action",
    "run: micro_batches": "micro.batches", "split: modules": "layers|modules",
    "apply: layers": "modules?", "accumulate: model": "module",
    "axis: name": "axis", "visualize: plan": "plan(:|=)|placements",
    "visualize: layers": "layers|modules?",
    "to_local: grad_axes": "axis|grad_axes",
    "to_local: grad_placements": "(grad_)?placements",
    "from_local: grad_placements": "(grad_)?placements",
    "full_tensor: grad_placements": "(grad_)?placements",
}  # fmt: skip
# Parameters that take everything: they are passed on, or are a value that may be plain.
FREE = {
    "compile: options",  # of torch.compile
    "set_all_reduce_hook: stream",
    "broadcast_value: x", "explain: args", "explain: kwargs", "from_fn: args", "save: state",
    "load: state",
    "shard_trainer: plan", "shard_trainer: layers",  # passed on to Strategy.apply
    "shard_accelerator: plan", "shard_accelerator: layers",
    "from_pretrained: plan", "from_pretrained: layers",
    "lightning_strategy: plan", "lightning_strategy: layers",
}  # fmt: skip
# Values that the library makes. What takes one of them checks it.
RESULTS = {
    "Action", "CommLog", "CommRecord", "DistTensor", "Event", "Explanation", "Group", "Layout",
    "Placement", "Recorder", "Split", "Tick",
}  # fmt: skip


def test_every_parameter_of_every_public_function_has_a_row():
    public = [
        *(
            (name, getattr(module, name))
            for module in (dt, *map(importlib.import_module, MODULES))
            for name in module.__all__
            if module.__name__ not in ("ops", "reshard") and name != "devices"
        ),
        *((f.__name__, f) for f in (from_fn, ops.DistSpec)),
        *(
            (name, value)
            for name, value in vars(devices).items()
            if callable(value) and value.__module__ == devices.__name__
        ),
        *((name, getattr(plans, name)) for name in ("experts", "megatron")),
        *(
            m
            for kind in (dt.Strategy, dt.Checkpointer, dt.fsdp.FSDPModule)
            for m in inspect.getmembers(kind, callable)
        ),
    ]
    wanted = {
        f"{name}: {parameter}"
        for name, function in public
        if name not in RESULTS and name[0] != "_"
        if not (isinstance(function, type) and issubclass(function, Exception))
        for parameter in inspect.signature(function).parameters
        if parameter != "self"
    }
    there = {f"{called(call)[1]}: {key}" for call, row in BAD.items() for key in row}
    assert wanted - there == FREE
    assert WORDS.keys() <= there


def called(call: str) -> tuple[str, str]:
    """What a call calls, with its name alone."""
    tree: Any = ast.parse(call, mode="eval").body
    function = ast.get_source_segment(call, tree.func) or ""
    return function, function.rpartition(".")[2]


def by_parameter(names: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """A text, a pattern of the error and the call, of each value in ``BAD``."""
    for call, row in BAD.items():
        text, name = called(call)
        function = eval(text, names)
        signature = inspect.signature(function)

        def run(call=call, text=text, function=function, signature=signature, key="", value=""):
            bound = eval("bind" + call.removeprefix(text), {**names, "bind": signature.bind})
            bound.arguments[key] = eval(value, names)
            out = function(*bound.args, **bound.kwargs)
            return out.__enter__() if isinstance(out, AbstractContextManager) else out

        for key, values in row.items():
            for value in values.split():
                word = WORDS.get(f"{name}: {key}", key)
                if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
                    word = "|".join(eval(value))
                elif len(signature.parameters) == 1:  # the name of the function says enough
                    word = f"{word}|{name}"
                case = functools.partial(run, key=key, value=value)
                yield f"{call}, {key}={value}", rf"\b({word})\b", case


def step(batch):
    return None


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor|.*sparse")
@everywhere
def test_arguments_that_a_function_cannot_take():
    mesh = grid()
    data = counted(8, 4)
    x = dt.shard_tensor(data, mesh, (S0, R))
    M = dt.shard_data_parallel(torch.nn.Linear(4, 4), mesh, "dp")
    made: list[torch.nn.Module] = []

    def lin():
        made.append(torch.nn.Linear(4, 4))
        return made[-1]

    names = {
        "dt": dt, "ops": ops, "torch": torch, "pipeline": pipeline, "plans": plans,
        "devices": devices, "ProcessMesh": ProcessMesh, "Shard": Shard,
        "Partial": Partial, "Replicate": Replicate, "S0": S0, "R": R, "P": P,
        "BALANCED": dt.attention.Balanced(0),
        "grid": grid, "x": x,
        "t": counted(4, 4), "M": M, "F": dt.fully_shard(torch.nn.Linear(4, 4), mesh=mesh),
        "COMM": type("Comm", (), {"allocate": step, "__call__": step})(),
        "W": dist.get_world_size() if dist.is_initialized() else 1,
        "h": counted(4, 4).requires_grad_() * 2, "lin": lin,
        "seq": lambda: torch.nn.Sequential(lin()),
        "step": step, "a_number": lambda size, **_: 3,
        "sparse": lambda size, **_: torch.zeros(size).to_sparse(), "gives_x": lambda piece: x,
        "LOADER": torch.utils.data.DataLoader(range(4)),
        "to_meta": lambda size, **_: torch.ones(size, device="meta"),
        "of_three": lambda size, **_: torch.ones(3), "to_sparse": torch.Tensor.to_sparse,
    }  # fmt: skip
    wrong = []
    cases = [(call, pattern, functools.partial(eval, call, names)) for pattern, call in CALLS]
    for call, pattern, run in [*cases, *by_parameter(names)]:
        with dt.debugging.record_comms() as log:
            try:
                wrong.append(f"{call}: gave {run()!r}")
            except Exception as error:
                if not re.search(pattern, str(error)):
                    wrong.append(f"{call}: {type(error).__name__}: {error}")
        # whether data are in a graph may differ, so the ranks compare it first
        if len(log) and call != "dt.shard_tensor(h,grid(),(S0,R),src_rank=0)":
            wrong.append(f"{call}: communicated {len(log)} times")
    assert not wrong, "\n".join(wrong)
    same(x, data)
    assert not any(isinstance(p, dt.DistTensor) for m in made for p in m.parameters())


@on_ranks(4)
def test_pieces_that_differ_are_named_on_all_ranks():
    """Those outside the mesh hear of it."""
    mesh, rank = ProcessMesh([0, 1, 2], ("dp",)), dist.get_rank()
    odd = torch.ones(2, 3, dtype=torch.float64 if rank == 1 else torch.float32)
    flat = torch.ones(2) if rank == 1 else torch.ones(2, 3)
    for piece, how, words in [
        (odd, (S0,), r"dtype differs.*torch.float64 on rank 1"),
        (flat, (S0,), r"ndim differs.*1 on rank 1"),
        (torch.ones(rank + 1), (S0,), "rank 0 has"),
        (torch.ones(2, 3), (S0, R), "has 2 entries"),
    ]:
        with pytest.raises((ValueError, dt.errors.MismatchError), match=words):
            dt.from_local(piece, mesh, how)
    x = dt.from_local(torch.ones(2, 3, dtype=torch.float64 if rank < 3 else None), mesh, (S0,))
    assert x.shape == (6, 3) and x.dtype is torch.float64  # outside too
    if rank < 3:
        with (
            dt.debugging.compare_ranks(),
            pytest.raises(dt.errors.MismatchError, match=r"torch.float64 on rank 1"),
        ):
            dt.from_local(odd, mesh, (S0,), shape=(6, 3))


@everywhere
def test_what_a_distributed_tensor_shares_with_a_plain_one():
    """A copy of a module, inference mode, a second placement of a DistTensor, and indices that are
    out of range."""
    mesh, plain = grid(), torch.nn.Linear(4, 4)
    model = dt.shard_module(copy.deepcopy(plain), mesh, {"weight": (S0, R)})
    loose = dt.shard_tensor(counted(4), mesh, requires_grad=True)
    for m in (plain, model):
        m(torch.ones(2, 4)).sum().backward()
        twin = copy.deepcopy(m)
        assert twin.weight.grad is None and m.weight.grad is not None
    loose.sum().backward()
    same(copy.deepcopy(loose).grad, torch.ones(4, dtype=torch.float64))
    with torch.inference_mode():
        y = dt.ones(4, mesh=mesh, placements=(S0, R))
        assert y.is_inference() and torch.is_inference(y + 1) and not loose.is_inference()
    x = dt.shard_tensor(counted(3, 6), mesh, (R, Shard(1)))
    again = dt.shard_tensor(x, mesh, dims_mapping=[0, -1], dtype=torch.float32, requires_grad=True)
    assert again.placements == (S0, R) and again.requires_grad and again.dtype is torch.float32
    for number in (-1, 6, 9):
        index = torch.tensor([0, number, 2])
        for loss in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
            with pytest.raises(IndexError, match=f"{number} is out of bounds"):
                loss(x, index)
        with pytest.raises(
            (IndexError, RuntimeError), match=f"{number} .* dimension 1 with size 6"
        ):
            torch.gather(x, 1, index[:, None])
        same(
            torch.take_along_dim(x, index[:, None], 1),
            torch.take_along_dim(counted(3, 6), index[:, None], 1),
        )


@everywhere
def test_arguments_that_were_ignored_or_failed_late_do_what_they_say():
    mesh, full = grid(), counted(4, 3)
    partial = functools.partial(torch.full, fill_value=2.0)
    made = dt.api.create.from_fn(partial, mesh, (S0, R), (4, 3), dtype=torch.float64)
    same(made, torch.full((4, 3), 2.0, dtype=torch.float64))
    mlp = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)})
    assert plans.megatron(mlp, -1, mesh) == plans.megatron(mlp, 1, mesh)
    h = full.clone().requires_grad_() * 2
    assert not dt.shard_tensor(h, mesh, (S0, R), requires_grad=False).requires_grad
    kept = dt.shard_tensor(h, mesh, (S0, R))
    assert kept.requires_grad and not kept.is_leaf
    whole = dt.shard_tensor(full, mesh)
    for x in (whole, dt.shard_tensor(full, mesh, (S0, R))):
        for array in (np.array(x), np.asarray(x).copy(), x.__array__(np.float64, copy=True)):
            array[0] = 7.0
            same(x, full)
        with pytest.raises(ValueError, match="memory of its own"):
            x.__array__(np.float32, copy=False)
    assert whole.__array__(copy=False).ctypes.data == whole.to_local().data_ptr()
    w = dt.shard_tensor(full, mesh, (S0, R), requires_grad=True)
    handles = [w.register_hook(lambda g: g), w.register_post_accumulate_grad_hook(lambda p: None)]
    handles.append((w * 2).register_hook(lambda g: g))
    assert len({handle.id for handle in handles}) == 3
    for handle in handles:
        assert isinstance(handle, torch.utils.hooks.RemovableHandle)
        with handle:
            pass
    if dist.is_initialized() and dist.get_backend() != "fake":
        limit = timeout_of(default_group()).total_seconds()
        world = dist.get_world_size()
        again = dt.init_mesh((world,), backend=dist.get_backend(), timeout=limit)
        assert again is dt.init_mesh((world,))
