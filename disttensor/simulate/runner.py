"""Runs the ranks of a world that are needed, several at a time, and compares ranks that should do
the same.

The differences between ranks are found by running some of them: rank 0 first, then one rank of each
kind known so far, until no run shows another difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from disttensor.checkpoint.tensor_file import rank_of
from disttensor.errors import SimulationError
from disttensor.simulate.child import Child
from disttensor.simulate.kind import names_of
from disttensor.simulate.kinds import Differences
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.run_rank import compare
from disttensor.simulate.templates import can_extend, derive, derived_ranks, extend, is_alike

_WHOLE = 8  # ranks: in a world up to this size all are compared, if the program reads its rank

Found = list[tuple[list[int], int, RankRun]]  # the ranks of each kind, and the one that was run
Classes = list[list[RankRun]]  # runs that are alike


class Runner:
    """Runs the first rank with all of its micro-batches. If they are equal, the other ranks run a
    ``short`` step, with some of theirs, and the rest is derived.

    files    bytes of the files that the program writes, and the ranks that write them, by path
    unknown  warnings: which ranks were not compared

    Args:
        start: starts a rank, with a short step or a whole one.
        before: is called before ranks are started.
    """

    def __init__(
        self, start: Callable[[int, bool], Child[tuple[RankRun, Differences]]],
        before: Callable[[], None],
    ) -> None:  # fmt: skip
        self.start, self.before = start, before
        self.short: bool | None = None  # not known yet
        self.files: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.unknown: list[str] = []

    def kinds(
        self, world: int, wanted: Iterable[int] | None, ranks_per_node: int
    ) -> list[tuple[list[int], RankRun]]:
        """Returns the ranks of each kind, and the run of one of them. Raises SimulationError if
        ranks of a kind do not communicate alike."""
        while True:
            found = self._representatives(world, wanted)
            compared = self._compared(found, world, ranks_per_node)
            if compared is not None:
                break
            self.short = False  # micro-batches are not equal
        out = []
        for (ranks, *_), classes in zip(found, compared, strict=True):
            known = {run.rank for runs in classes for run in runs}
            rest = [r for r in ranks if r not in known]
            largest = max(reversed(classes), key=len)
            for runs in classes:
                mine = sorted([*(run.rank for run in runs), *(rest if runs is largest else ())])
                mine = [r for r in dict.fromkeys(mine) if r in ranks]
                self._add_files(runs, mine)
                out.append((mine, runs[0]))
        return out

    def _representatives(self, world: int, wanted: Iterable[int] | None) -> Found:
        """Runs one rank of each kind. Of equal stages two are run, and the others are derived.

        Returns:
            For each kind: its ranks, the rank that was run, and its run.
        """
        known, results = Differences(), dict[int, RankRun]()
        compared, excluded = set[tuple[int, int]](), set[int]()  # pairs of ranks; stages
        asked = range(world) if wanted is None else set(wanted)
        while True:
            groups = [kept for g in known.groups(world) if (kept := [r for r in g if r in asked])]
            missing = [g[0] for g in groups if not any(r in results for r in g)]
            if not missing:
                firsts = [next(r for r in g if r in results) for g in groups]
                return [(g, r, results[r]) for g, r in zip(groups, firsts, strict=True)]
            derived = {d.rank: d for d in derived_ranks(known.stages, known.work, groups, excluded)}
            to_run = [r for r in missing if r not in derived]
            for run, differences in self._steps(to_run):
                results[run.rank] = run
                known.update(differences)
            for rank in () if to_run else missing:
                one = derived[rank]
                ends = results[one.first], results[one.last]
                if (one.first, one.last) not in compared and not is_alike(*ends, one):
                    excluded.add(one.suspect)
                    break
                compared.add((one.first, one.last))
                try:
                    results[rank] = derive(*ends, one)
                except ValueError:
                    excluded.add(one.stage)
                    break

    def _steps(self, ranks: Sequence[int]) -> list[tuple[RankRun, Differences]]:
        """Returns the steps of ranks with all micro-batches: run, or derived from short ones."""
        if self.short is None:
            first = self._run(ranks[:1], False)
            self.short = can_extend(first[0][0])
            return [*first, *self._steps(ranks[1:])]
        found = self._run(ranks, self.short)
        for i, (run, differences) in enumerate(found) if self.short else ():
            try:
                found[i] = extend(run), differences
            except (ValueError, LookupError):  # this stage has to run all of them
                (found[i],) = self._run([run.rank], False)
        return found

    def _run(self, ranks: Sequence[int], short: bool) -> list[tuple[RankRun, Differences]]:
        """Runs ranks, as many at once as there are cores."""
        out, at_once = [], len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        for i in range(0, len(ranks), at_once):
            self.before()
            children = [self.start(rank, short) for rank in ranks[i : i + at_once]]
            try:
                out += [child.result() for child in children]
            finally:
                for child in children:
                    child.end()
        return out

    def _compared(self, found: Found, world: int, ranks_per_node: int) -> list[Classes] | None:
        """Runs more ranks and compares each with the run of its kind: the last of the first kind.
        If the program reads its rank, all ranks of a small world, or some of the first kind.

        Returns:
            For each kind the runs, those that do the same in one list. None if runs differ because
            short steps were run.
        """
        reads = dict.fromkeys(line for *_, run in found for line in run.reads)
        asked = [[*_chosen(*kind[:2], world, ranks_per_node)] if reads else [] for kind in found]
        ranks, first, _ = found[0]
        if not reads:
            asked[0] = [r for r in ranks if r != first][-1:]
        if not any(asked) and self.short:
            asked[0] = [first]
        runs = iter(self._steps([r for others in asked for r in others]))
        out: list[Classes] = []
        for (members, _, run), others in zip(found, asked, strict=True):
            classes = [[run]]
            for _ in others:
                other, _ = next(runs)
                alike = self._find(classes, other, bool(reads))
                if self.short and (alike is not classes[0] or not other.has_peak_of(run)):
                    return None
                if alike is None:
                    classes.append([other])
                else:
                    alike.append(other)
            out.append(classes)
            if reads and len(others) + 1 < len(members):
                known = names_of(sorted(one.rank for same in classes for one in same))
                self.unknown = self.unknown or [
                    f"the program reads its rank ({', '.join(reads)}), and of ranks "
                    f"{names_of(members)} only {known} were run and compared: others may do "
                    "something else, which the report does not show"
                ]
        return out

    def _find(self, classes: Classes, other: RankRun, reads: bool) -> list[RankRun] | None:
        """Returns the runs that do the same as ``other``. Raises SimulationError if its
        communication differs, unless short steps were run."""
        try:
            return next((runs for runs in classes if compare(runs[0], other, reads)), None)
        except SimulationError:
            if not self.short:
                raise
            return None

    def _add_files(self, runs: list[RankRun], ranks: list[int]) -> None:
        for path, nbytes in {path: n for run in runs for path, n in run.files.items()}.items():
            by = [run.rank for run in runs if path in run.files]
            _, others = self.files.get(path, (0, ()))
            writer = rank_of(os.path.basename(path))  # of a checkpoint, whose plan names all files
            mine = [writer] if writer is not None else ranks if len(by) == len(runs) else by
            self.files[path] = nbytes, (*others, *(r for r in mine if r not in others))


def _chosen(ranks: Sequence[int], first: int, world: int, ranks_per_node: int) -> Iterator[int]:
    """Yields the ranks of a kind to compare with ``first``, of a program that reads its rank."""
    others = [r for r in ranks if r != first]
    if world <= _WHOLE:
        yield from others
    elif 0 in ranks:
        node = (r for r in others if r % ranks_per_node == 0)
        yield from dict.fromkeys([*others[:1], *[*node][:1], *others[-1:]])
