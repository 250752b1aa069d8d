"""Strategy: one value says how a training run is divided among processes; one call does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from disttensor import pipeline
from disttensor.checks import check_bool, check_int, check_sequence, check_type
from disttensor.comm import process_group
from disttensor.comm.rendezvous import create_groups
from disttensor.core.init_mesh import init_mesh
from disttensor.core.mesh import ProcessMesh, as_mesh, check_device_type
from disttensor.core.placement import Placement, Replicate, Shard
from disttensor.fsdp.contexts import accumulate
from disttensor.fsdp.fully_shard import shard_data_parallel
from disttensor.fsdp.mixed_precision import check_dtypes
from disttensor.fsdp.segment_policy import SegmentPolicy, Segments, segments_of
from disttensor.fsdp.shard_arguments import check_hooks
from disttensor.nn.names import close_to
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import check_module, check_plan, shard_module
from disttensor.optim.grad_scaler import shard_scaler
from disttensor.parallel import degrees as _degrees
from disttensor.parallel.degrees import AXES, Degrees, GroupSpec
from disttensor.parallel.rebind_optimizer import Maker, Optimizer, check_optimizer, rebind
from disttensor.parallel.rematerialize import modules_to_recompute, recompute
from disttensor.parallel.sharding_configs import strategy_fields
from disttensor.parallel.stage_plan import stage_plan
from disttensor.pipeline.partition import assign_layers
from disttensor.pipeline.partition import named_layers as layers_of
from disttensor.pipeline.schedule import route
from disttensor.pipeline.schedules import NAMES as SCHEDULES
from ops.nn.attention_policy import POLICIES, policy

_OTHER_NAMES = {"fsdp": "sharding", "hsdp": "sharding", "ddp": "dp", "zero": "zero_stage"}
AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Divides a training run among processes. A script does not depend on the degrees.

    If degrees are left out, the first of dp, sharding, tp, cp, pp (with a ``zero_stage``: sharding,
    dp, ...) that is left out gets the remaining factor of the world size, and the others are 1.
    ``degrees`` (and with it ``mesh``, ``stages`` and ``apply``) raises ValueError for a world size
    that is not a product of the degrees.

    Args:
        dp: parts of the batch, each with a replica of everything.
        sharding: parts of the batch, and of the optimizer's state, gradients and parameters.
        tp: parts of each layer, as the plan given to ``apply`` says.
        cp: parts of the sequence.
        pp: stages of some layers each.
        accumulate_steps: micro-batches in one step of the optimizer.
        schedule: the name of a pipeline schedule, for ``pipeline.run``; it determines how often a
            stage is visited.
        attention: a policy as in ``dt.attention.policy``, applied inside ``autocast``.
        amp: "bf16" or "fp16", for ``autocast`` and, with sharding, for unsharded parameters
            (``param_dtype``); gradients are reduced in float32 (``reduce_dtype``).
        recompute: modules, by names or globs as "blocks.*", that keep no activations.
        zero_stage: 1, 2 or 3 (the default), as ``stage`` of ``shard_data_parallel``.
        segments, reshard_after_forward, prefetch, offload, param_dtype, reduce_dtype: as in
            ``shard_data_parallel``.
        device_type: as in ``init_mesh``.

    Raises TypeError and ValueError for invalid arguments.

    >>> strategy = dt.Strategy(tp=2, sharding=4, accumulate_steps=2)
    >>> print(strategy.degrees(32))
    pp=1 x dp=4 x sharding=4 x cp=1 x tp=2
    >>> strategy = dt.Strategy(zero_stage=3, accumulate_steps=2)    # here, in a world of one
    >>> strategy.mesh()
    ProcessMesh(pp=1, dp=1, sharding=1, cp=1, tp=1)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> plan = {"0.*": {"tp": dt.Shard(0)}, "2.weight": {"tp": dt.Shard(1)}}
    >>> model, optimizer = strategy.apply(model, optimizer, plan)
    >>> places = strategy.batch(sequence=None)
    >>> data = dt.shard_tensor(torch.ones(6, 4), strategy.stages()[0], places)
    >>> for i, part in enumerate(data.chunk(strategy.accumulate_steps)):
    ...     with strategy.accumulate(model, i), strategy.autocast():
    ...         (model(part).sum() / len(data)).backward()
    >>> optimizer.step()
    """

    dp: int | None = None
    sharding: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    accumulate_steps: int = 1
    schedule: str = "1f1b"
    segments: Segments | None = None
    attention: str = "auto"
    amp: str | None = None
    recompute: Sequence[str] = ()
    zero_stage: int | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    offload: bool = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    device_type: str | None = None

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) is not None:
                processes = "a whole number of processes"
                check_int(f"Strategy: {axis}", getattr(self, axis), 1, processes)
        check_int("Strategy: accumulate_steps", self.accumulate_steps, 1)
        check_int("Strategy: prefetch", self.prefetch, 0, "a number of segments")
        check_bool("Strategy: reshard_after_forward", self.reshard_after_forward)
        check_bool("Strategy: offload", self.offload)
        check_dtypes("Strategy", param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        check_device_type("Strategy", self.device_type)
        stage = self.zero_stage
        if stage is not None and (type(stage) is not int or stage not in (1, 2, 3)):
            raise ValueError(
                f"Strategy: zero_stage={self.zero_stage!r}: 1 shards the state of the optimizer, 2 "
                "gradients too, 3 parameters too. To shard nothing, leave it out and set sharding=1"
            )
        for name, known in (("attention", list(POLICIES)), ("schedule", list(SCHEDULES))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"Strategy: {name}={getattr(self, name)!r}: it is one of "
                    + ", ".join(map(repr, known))
                )
        if self.amp is not None and self.amp not in list(AMP):
            raise ValueError(f"Strategy: amp={self.amp!r}: it is None, 'bf16' or 'fp16'")
        names = (self.recompute,) if isinstance(self.recompute, str) else self.recompute
        object.__setattr__(self, "recompute", _names("recompute", names))
        if self.segments is not None and not isinstance(self.segments, SegmentPolicy):
            object.__setattr__(self, "segments", _names("segments", self.segments))

    @classmethod
    def from_sharding_configs(cls, configs: Mapping[str, Any], **more: Any) -> Strategy:
        """Returns the strategy for a dict of sharding configs, with ``more`` fields of Strategy.

        Keys: sharding_degree, mp_degree (tp), dp_degree, pp_degree, hybrid_dp,
        sharding_segment_strategy ("segment_broadcast_MB" or "segment_anchors"),
        segment_broadcast_MB, segment_anchors, gradient_merge_acc_step, optimize_offload. Raises
        TypeError and ValueError for other keys, for contradictions, and, once several processes
        have started, for degrees whose product is not their number.

        >>> configs = {"sharding_degree": 8, "hybrid_dp": True, "gradient_merge_acc_step": 4}
        >>> configs |= {"segment_broadcast_MB": 16}
        >>> strategy = dt.Strategy.from_sharding_configs(configs, amp="bf16")
        >>> strategy.segments, strategy.accumulate_steps
        (SegmentBySize(megabytes=16), 4)
        """
        fields = strategy_fields(configs)
        twice = sorted(fields.keys() & more.keys())
        if twice:
            raise ValueError(f"from_sharding_configs: {', '.join(twice)}: set by configs too")
        strategy = cls(**fields, **more)
        if process_group.world()[1] > 1:
            try:
                strategy.degrees()
            except ValueError as error:
                raise ValueError(
                    f"sharding configs {dict(configs)}: {error}. Here mp_degree is tp, and with "
                    "hybrid_dp=True and without dp_degree, dp gets the remaining factor"
                ) from None
        return strategy

    def degrees(self, world: int | None = None) -> Degrees:
        """Returns the sizes of all axes in a world of this size; None: in the current world, which
        is then started.

        >>> dt.Strategy(tp=4, pp=2).degrees(32)
        Degrees(pp=2, dp=4, sharding=1, cp=1, tp=4)
        """
        if world is None:
            process_group.join_world(self.device_type)
            world = process_group.world()[1]
        given = {axis: getattr(self, axis) for axis in AXES}
        return _degrees.infer(given, world, "dp" if self.zero_stage is None else "sharding")

    def mesh(self) -> ProcessMesh:
        """Returns the mesh of all processes with axes ("pp", "dp", "sharding", "cp", "tp")."""
        return init_mesh(self.degrees(), AXES, device_type=self.device_type)

    def stages(self) -> list[ProcessMesh]:
        """Returns the mesh of each stage, with the axes ("dp", "sharding", "cp", "tp")."""
        mesh = self.mesh()
        return [mesh[i] for i in range(mesh.shape[0])]

    def visits(self) -> list[ProcessMesh]:
        """Returns the mesh of each stage in the order in which ``schedule`` visits them, with
        repetitions: ``pipeline.run(step, batches, strategy.schedule,
        stages=strategy.visits())``.

        >>> dt.Strategy(schedule="zbv").visits()    # there and back, over one stage
        [ProcessMesh(dp=1, sharding=1, cp=1, tp=1), ProcessMesh(dp=1, sharding=1, cp=1, tp=1)]
        """
        return pipeline.visits(self.stages(), self.schedule)

    def groups(self, world: int | None = None) -> list[GroupSpec]:
        """Returns the communicators that ``apply`` creates, on all ranks in one order.

        >>> dt.Strategy(tp=2).groups(world=4)[0]
        GroupSpec(ranks=(0, 2), axes=('dp',), purpose='')
        """
        return _degrees.groups(self.degrees(world))

    def batch(self, sequence: int | None = 1) -> list[Placement]:
        """Returns the placements of a batch on a stage: dim 0 is split over dp and sharding, dim
        ``sequence`` over cp (None: no such dim).

        >>> dt.Strategy().batch()
        [Shard(0), Shard(0), Shard(1), Replicate()]
        """
        if sequence is not None:
            check_int("Strategy.batch: sequence", sequence)
        over_cp = Replicate() if sequence is None else Shard(sequence)
        return [Shard(0), Shard(0), over_cp, Replicate()]

    def apply(
        self,
        model: nn.Module,
        optimizer: Optimizer | Maker | None = None,
        plan: Any = None,
        *,
        layers: Iterable[nn.Module | str] | None = None,
        counts: Sequence[int] | None = None,
        balance: str | Sequence[float] | None = None,
        sample: Any = None,
        visits: int | Sequence[ProcessMesh] | None = None,
        init: Callable[[nn.Module], Any] | None = None,
    ) -> tuple[nn.Module, Optimizer | None]:
        """Shards ``model`` in place, rebinds its optimizer, and returns both. All ranks call it.

        ``plan``: as for ``shard_module`` on the mesh of a stage, names -> placements. Placements
        may also be a dict by axis: {"blocks.*.up.weight": {"tp": dt.Shard(0)}}. The strategy itself
        splits parameters over ``sharding``, except experts that the plan splits there.
        ``optimizer``: an optimizer of the model's parameters without state, or a function of
        parameters that returns an optimizer. ``layers``: the layers of the stages of ``pp`` (not
        needed for a Sequential), ``counts[i]`` on stage i, or divided by ``balance`` (and
        ``sample``). ``visits``: how often each stage is visited in the order of ``schedule``, or
        the meshes in the order of their visits; by default the visits of ``schedule`` (see
        ``pipeline.split``). ``init``: see ``shard_module``.

        Raises TypeError and ValueError for invalid arguments, before anything is changed.
        """
        check_module("Strategy.apply: model", model)
        check_plan("Strategy.apply", plan, init)
        places, order = stage_plan(plan, model), self._order(visits)
        check_optimizer(optimizer, model)
        waiting = [name for name, p in model.named_parameters() if p.grad is not None]
        if waiting:
            raise ValueError(
                f"Strategy.apply: parameter {waiting[0]!r} has a gradient, which would be lost: "
                "zero_grad() first"
            )
        recomputed = modules_to_recompute(model, self.recompute)
        if self.segments is not None:
            segments_of(model, self.segments)
        pp, options = self.degrees().pp, {"counts": counts, "balance": balance, "sample": sample}
        if layers is None:
            self._check_layers(model, pp, order, options)
        create_groups(self.groups())
        before = slots(model)
        segments: Segments | None = self.segments
        collects = self.degrees().sharding > 1 or self._param_dtype() is not None
        mesh = self.stages()[0] if pp == 1 and layers is None else None
        on, who = mesh or self.mesh(), "Strategy.apply"
        with check_hooks(who, model, on, values=True) if collects else nullcontext():
            if mesh is not None:
                shard_module(model, mesh, places, init=init)
            else:
                modules: Any = model if layers is None else layers
                split = pipeline.split(modules, order, places, of=model, init=init, **options)
                if segments is None and pp > 1:  # a segment lies on one stage
                    segments = tuple(
                        name for name, _ in split if [*model.get_submodule(name).parameters()]
                    )
            model = self._shard_data_parallel(model, mesh, segments)
        recompute(model, recomputed)
        return model, rebind(optimizer, model, before)

    def _order(self, visits: Any) -> list[ProcessMesh]:
        """Returns the meshes of the stages in the order of their visits. Raises TypeError and
        ValueError for ``visits`` that are none."""
        if isinstance(visits, (list, tuple)):
            return [as_mesh("Strategy.apply: visits: entry", mesh) for mesh in visits]
        if visits is None:
            return self.visits()
        times = check_int("Strategy.apply: visits", visits, 1)
        shape = SCHEDULES[self.schedule].shape
        if shape == "v" and times != 2:
            raise ValueError(
                f"Strategy.apply: visits={times}: {self.schedule!r} visits each stage twice, there "
                "and back. Leave visits out, or choose another schedule"
            )
        return route(shape, self.stages(), times)

    def _check_layers(
        self, model: nn.Module, pp: int, order: list[ProcessMesh], options: dict[str, Any]
    ) -> None:
        """Checks a call without ``layers``: only the order of a Sequential is known."""
        is_sequential = isinstance(model, nn.Sequential)
        if pp > 1 and not is_sequential:
            raise ValueError(
                f"Strategy.apply: pp={pp} stages of which layers of this {type(model).__name__}? "
                "Say in which order it runs them: apply(..., layers=['embed', 'blocks.*', 'head'])"
            )
        if pp == 1 and any(value is not None for value in options.values()):
            counts, balance, sample = options.values()
            if not is_sequential:
                raise ValueError(
                    f"Strategy.apply: {counts=}, {balance=} and sample describe how layers are "
                    "divided: pass layers= too"
                )
            assign_layers(layers_of(model, model)[1], order, counts, balance, model, sample)

    def _param_dtype(self) -> torch.dtype | None:
        """Returns the dtype of unsharded parameters; None if they keep theirs."""
        if self.param_dtype is None and self.amp is not None and self.degrees().sharding > 1:
            return AMP[self.amp]
        return self.param_dtype

    def _shard_data_parallel(
        self, model: nn.Module, mesh: ProcessMesh | None, segments: Segments | None
    ) -> nn.Module:
        sharding, low = self.degrees().sharding, self._param_dtype()
        given: dict[str, Any] = {} if segments is None else {"segments": segments}
        return shard_data_parallel(
            model,
            mesh,
            shard_axis="sharding" if sharding > 1 else None,
            replicate_axis="dp",
            stage=self.zero_stage or 3,
            **given,
            reshard_after_forward=self.reshard_after_forward,
            prefetch=self.prefetch,
            param_dtype=low,
            reduce_dtype=self.reduce_dtype or (torch.float32 if low and self.amp else None),
            offload=self.offload,
        )

    def accumulate(self, model: nn.Module, micro_batch: int) -> AbstractContextManager[Any]:
        """Returns a context for each micro-batch: replicas are summed only after the last one."""
        check_int("Strategy.accumulate: micro_batch", micro_batch, 0)
        return accumulate(model, last=(micro_batch + 1) % self.accumulate_steps == 0)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Returns a context for a forward and its loss: torch.autocast to the dtype of ``amp``
        (unchanged without ``amp``), and ``dt.attention.policy(attention)``.

        >>> with dt.Strategy(amp="bf16").autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
        """
        with ExitStack() as around:
            if self.attention != "auto":  # else one that is set outside holds
                around.enter_context(policy(self.attention))
            if self.amp is not None:
                around.enter_context(torch.autocast(self._device(), AMP[self.amp]))
            yield

    def scaler(self, **options: Any) -> torch.amp.GradScaler:
        """Returns a torch.amp.GradScaler that skips the same steps on all ranks, which all call
        this. It is enabled for "fp16" only, so a script can always use it. ``options`` are torch's.

        >>> dt.Strategy().scaler().is_enabled(), dt.Strategy(amp="fp16").scaler().is_enabled()
        (False, True)
        """
        scaler = torch.amp.GradScaler(self._device(), enabled=self.amp == "fp16", **options)
        return shard_scaler(scaler) if scaler.is_enabled() else scaler

    def _device(self) -> str:
        return ProcessMesh([0], ("first",), self.device_type).device_type


def _names(field: str, value: Any) -> tuple[str, ...]:
    """Returns names of modules as a tuple."""
    names = check_sequence(f"Strategy: {field}", value, "a list of names of modules")
    for name in names:
        check_type(f"Strategy: {field}: entry", name, str, "the name of a module")
    return names


def _check_names(init: Callable[..., None]) -> Callable[..., None]:
    """Returns ``init`` with an error for an unknown argument that names the one that is meant."""
    names = list(Strategy.__dataclass_fields__)

    @wraps(init)
    def checked(self: Strategy, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in names:
                meant = _OTHER_NAMES.get(name) or next(iter(close_to(name, names, 1)), None)
                why = f"; did you mean {meant!r}?" if meant else "."
                raise TypeError(f"Strategy: no argument {name!r}{why} The arguments are {names}")
        init(self, *args, **given)

    return checked


Strategy.__init__ = _check_names(Strategy.__init__)  # type: ignore[method-assign]
