"""disttensor: write ordinary single-device PyTorch, run it on a mesh of processes, with one global
meaning.

The examples in docstrings run after ``import torch, disttensor as dt; mesh = dt.init_mesh((1, 1),
("dp", "tp"))``, in a world of one: with more processes only the mesh differs.
"""
# ruff: noqa: I001  (imports stand from the bottom up)

from disttensor import versions as _versions

with _versions.importing():
    from disttensor import errors  # noqa: F401
    from disttensor.errors import (
        CommError, CustomFunctionError, FallbackWarning, MismatchError, StrictError,
    )  # fmt: skip
    from disttensor.core.placement import Balanced, Partial, Placement, Replicate, Shard
    from disttensor.core.layout import Layout
    from disttensor.comm.groups import Group
    from disttensor.comm.compare_programs import debug
    from disttensor.comm.log import CommLog, CommRecord, record_comms
    from disttensor.core.mesh import ProcessMesh, init_mesh
    from disttensor.core.spec import DistSpec
    import ops as _ops  # noqa: F401
    from ops.nn.attention_policy import attention_policy
    import reshard as _reshard  # noqa: F401
    from disttensor.random.counter import manual_seed
    from disttensor.random.state import rng
    from disttensor.tensor.dist_tensor import DistTensor
    from disttensor.tensor.grad_sync import sync_gradients
    from disttensor.tensor.values import broadcast_value, values_everywhere
    from disttensor.trace.skip import never_skip
    import disttensor.dispatch.handlers
    import disttensor.dispatch.native  # noqa: F401  (the two complete DistTensor)
    from disttensor.dispatch.explain import Explanation, explain
    from disttensor.dispatch.strict import strict
    from disttensor.optim.clip_grad import clip_grad_norm_
    from disttensor.optim.grad_scaler import shard_scaler
    from disttensor.api.create import (
        arange, distribute_tensor, empty, from_fn, full, ones, rand, randint, randn, randperm,
        reshard, shard_tensor, zeros,
    )  # fmt: skip
    from disttensor.api.from_local import from_local
    from disttensor.api.interop import from_dtensor, to_dtensor
    from disttensor.api.local_map import local_map
    from disttensor.trace.replay import replay
    from disttensor.data.shard_loader import shard_loader
    from disttensor.nn import tensor_parallel_plans as plans  # noqa: F401
    from disttensor.experts.expert_load import expert_load
    from disttensor.experts.dispatch_tokens import combine_tokens, dispatch_tokens
    from disttensor.nn.shard_module import shard_module
    from disttensor.checkpoint.checkpointer import Checkpointer
    from disttensor.checkpoint.load_pretrained import load_pretrained
    from disttensor.checkpoint.save_pretrained import save_pretrained
    from disttensor.fsdp.replicas import check_replicas
    from disttensor.fsdp.segment_policy import SegmentByAnchors, SegmentBySize
    from disttensor.fsdp.fully_shard import accumulate, shard_data_parallel
    from disttensor.fsdp.torch_names import fully_shard, replicate
    from disttensor.fsdp.unshard import unshard
    from disttensor.parallel.strategy import Strategy
    from disttensor.api.info import info
    from disttensor.simulate import devices  # noqa: F401
    from disttensor.simulate.plan_strategy import plan_strategy
    from disttensor.simulate.run import simulate
    from disttensor import attention, debugging, experts, patches, pretrained  # noqa: F401

    patches.install()

__version__ = _versions.__version__

__all__ = [
    "Balanced", "Checkpointer", "CommError", "CommLog", "CommRecord", "CustomFunctionError",
    "DistSpec", "DistTensor",
    "Explanation", "FallbackWarning", "Group",
    "Layout", "MismatchError", "Partial", "Placement", "ProcessMesh", "Replicate",
    "SegmentByAnchors", "SegmentBySize", "Shard", "Strategy",
    "StrictError", "accumulate", "arange", "attention_policy", "broadcast_value", "check_replicas",
    "clip_grad_norm_", "combine_tokens", "debug", "dispatch_tokens", "distribute_tensor",
    "empty", "expert_load", "explain", "from_dtensor",
    "from_fn", "from_local", "full", "fully_shard", "info", "init_mesh", "load_pretrained",
    "local_map",
    "manual_seed", "never_skip", "ones", "plan_strategy",
    "rand", "randint", "randn", "randperm",
    "record_comms", "replay", "replicate", "reshard", "rng", "save_pretrained",
    "shard_data_parallel",
    "shard_loader", "shard_module",
    "shard_scaler", "shard_tensor", "simulate", "strict", "sync_gradients",
    "to_dtensor", "unshard", "values_everywhere", "zeros",
]  # fmt: skip
