"""disttensor: write ordinary single-device PyTorch, run it on a mesh of processes, with one global meaning.

The examples in docstrings run after ``import torch, disttensor as dt; mesh = dt.init_mesh((1, 1), ("dp", "tp"))``,
in a world of one: with more processes only the mesh differs.
"""

from disttensor import versions as _versions

with _versions.importing():
    from disttensor.placement import Partial, Placement, Replicate, Shard  # noqa: I001  (from the bottom up)
    from disttensor.layout import Layout
    from disttensor.comm import CommError, Group
    from disttensor.comm_debug import MismatchError, debug
    from disttensor.comm_log import CommLog, CommRecord, record_comms
    from disttensor.mesh import ProcessMesh
    from disttensor.spec import DistSpec
    import ops as _ops  # noqa: F401
    import reshard as _reshard  # noqa: F401
    from disttensor.random import manual_seed, rng
    from disttensor.tensor import DistTensor
    from disttensor.strictness import FallbackWarning, StrictError, strict

    # These complete DistTensor and teach torch about it:
    import disttensor.checkpoint
    import disttensor.custom
    import disttensor.methods
    import disttensor.nn_init
    from disttensor.api import (
        empty, from_fn, from_local, full, init_mesh, ones, rand, randn, randperm, reshard, shard_tensor, zeros,
    )  # fmt: skip
    from disttensor.clip import clip_grad_norm_
    from disttensor.custom import CustomFunctionError
    from disttensor.explain import Explanation, explain
    from disttensor.interop import from_dtensor, to_dtensor
    from disttensor.local_map import local_map
    from disttensor.module import shard_module
    import disttensor.plans  # noqa: F401
    from disttensor.skip import never_skip
    from disttensor.sync import sync_gradients
    from disttensor.values import broadcast_value, values_everywhere
    from disttensor.scaler import shard_scaler
    from disttensor.parallel.replicas import check_replicas
    from disttensor.parallel.segments import SegmentByAnchors, SegmentBySize
    from disttensor.parallel.sharded import accumulate, shard_data_parallel
    from disttensor.parallel.strategy import Strategy

__all__ = [
    "CommError", "CommLog", "CommRecord", "CustomFunctionError", "DistSpec", "DistTensor", "Explanation", "FallbackWarning", "Group",
    "Layout", "MismatchError", "Partial", "Placement", "ProcessMesh", "Replicate", "SegmentByAnchors", "SegmentBySize", "Shard", "Strategy",
    "StrictError", "accumulate", "broadcast_value", "check_replicas", "clip_grad_norm_", "debug", "empty", "explain", "from_dtensor",
    "from_fn", "from_local", "full", "init_mesh", "local_map", "manual_seed", "never_skip", "ones", "rand", "randn", "randperm",
    "record_comms", "reshard", "rng", "shard_data_parallel", "shard_module", "shard_scaler", "shard_tensor", "strict", "sync_gradients",
    "to_dtensor", "values_everywhere", "zeros",
]  # fmt: skip
