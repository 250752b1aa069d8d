"""disttensor: write ordinary single-device PyTorch, run it on a mesh of processes, with one global
meaning.

The examples in docstrings run after ``import torch, disttensor as dt, ops, reshard; mesh =
dt.init_mesh((1, 1), ("dp", "tp"))``, in a world of one: with more processes only the mesh differs.
"""
# ruff: noqa: I001  (imports stand from the bottom up)

from disttensor import module_names as _module_names

_module_names.check_names("ops", "reshard")

from disttensor import versions as _versions  # noqa: E402

with _versions.importing():
    from disttensor import errors  # noqa: F401
    from disttensor.core.placement import Partial, Placement, Replicate, Shard
    from disttensor.core.mesh import ProcessMesh
    from disttensor.core.init_mesh import init_mesh
    import ops as _ops  # noqa: F401
    import reshard as _reshard  # noqa: F401
    from disttensor.random.counter import manual_seed
    from disttensor.tensor.dist_tensor import DistTensor
    from disttensor.gradients.sync import sync_gradients
    from disttensor.tensor.values import broadcast_value, values_everywhere
    import disttensor.dispatch.handlers
    import disttensor.dispatch.native  # noqa: F401  (the two complete DistTensor)
    from disttensor.optim.clip_grad import clip_grad_norm_
    from disttensor.api.shard import distribute_tensor, reshard, shard_tensor
    from disttensor.api.create import (
        arange, empty, full, ones, rand, randint, randn, randperm, zeros,
    )  # fmt: skip
    from disttensor.api.from_local import from_local
    from disttensor.api.interop import from_dtensor, to_dtensor
    from disttensor.api.local_map import local_map
    from disttensor.graphs.capture import capture
    from disttensor.graphs.compile import compile
    from disttensor.trace.replay import replay
    from disttensor.data.shard_loader import shard_loader
    from disttensor.nn import tensor_parallel_plans as plans  # noqa: F401
    from disttensor.nn.shard_module import shard_module
    from disttensor.checkpoint.checkpointer import Checkpointer
    from disttensor.publishing.publisher import publish
    from disttensor.publishing.receiver import receive
    from disttensor.fsdp.contexts import accumulate
    from disttensor.fsdp.fully_shard import shard_data_parallel
    from disttensor.fsdp.torch_names import fully_shard, replicate
    from disttensor.parallel.strategy import Strategy
    from disttensor.pieces.visualize import visualize
    from disttensor.hangs.watcher import watch
    from disttensor.launching.launch import launch
    from disttensor.launching.local_ranks import local_ranks
    from disttensor.verification.runs import verify
    from disttensor import (  # noqa: F401
        attention, debugging, experts, fsdp, integrations, optim, patches, pipeline, pretrained,
        random, simulate,
    )  # fmt: skip

    from disttensor.integrations.pretrained_model import from_pretrained

    patches.install()

__version__ = _versions.__version__

__all__ = [
    "Checkpointer", "DistTensor", "Partial", "Placement", "ProcessMesh", "Replicate", "Shard",
    "Strategy", "accumulate", "arange", "broadcast_value", "capture", "clip_grad_norm_", "compile",
    "distribute_tensor", "empty", "from_dtensor", "from_local", "from_pretrained", "full",
    "fully_shard", "init_mesh", "launch", "local_map", "local_ranks", "manual_seed", "ones",
    "publish", "rand", "randint", "randn", "randperm", "receive", "replay", "replicate", "reshard",
    "shard_data_parallel", "shard_loader", "shard_module", "shard_tensor", "sync_gradients",
    "to_dtensor", "values_everywhere", "verify", "visualize", "watch", "zeros",
]  # fmt: skip
