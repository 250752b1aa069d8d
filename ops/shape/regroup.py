"""regroup: relates the dims before and after a view or reshape, by arithmetic on shapes alone.

Both shapes are walked from the front and cut where their products meet: [4, 6, 5] -> [24, 5] has
the groups 4*6 -> 24 and 5 -> 5. A group of one dim on each side is that dim. In any other group
only the *major* factor that both sides share can be split, and only evenly: then each piece is a
run of whole rows on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ops.factors import Arg, Dims, Factors, Letter


def resolve(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns ``sizes`` with -1 filled in. Raises RuntimeError, as torch does."""
    total = math.prod(shape)
    known = math.prod(s for s in sizes if s != -1)
    out = tuple(sizes)
    if -1 in out and known and total % known == 0:
        at = out.index(-1)
        out = (*out[:at], total // known, *out[at + 1 :])
    if any(s < 0 for s in out) or math.prod(out) != total:
        raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {total}")
    return out


def groups(src: Sequence[int], dst: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns matching dims of ``src`` and ``dst`` (without sizes of 1), from the front."""
    left = [d for d, s in enumerate(src) if s != 1]
    right = [d for d, s in enumerate(dst) if s != 1]
    out = []
    while left:
        ours, theirs = [left.pop(0)], [right.pop(0)]
        a, b = src[ours[0]], dst[theirs[0]]
        while a != b:
            if a < b:
                ours.append(left.pop(0))
                a *= src[ours[-1]]
            else:
                theirs.append(right.pop(0))
                b *= dst[theirs[-1]]
        out.append((ours, theirs))
    return out


def regroup(
    src: Sequence[int], dst: Sequence[int]
) -> tuple[Dims, Dims, dict[Letter, int], set[Letter]]:
    """Returns (letters of src, letters of dst, sizes, letters that split evenly or not at all)."""
    ins: list[Letter] = [None] * len(src)
    outs: list[Letter] = [None] * len(dst)
    sizes: dict[Letter, int] = {}
    even: set[Letter] = set()
    if 0 in src:  # nothing to order: leading dims that agree keep their letters
        for d, (s, t) in enumerate(zip(src, dst, strict=False)):
            if s != t:
                break
            ins[d] = outs[d] = d
            sizes[d] = s
        return tuple(ins), tuple(outs), sizes, set()
    for n, (ours, theirs) in enumerate(groups(src, dst)):
        i, o = ours[0], theirs[0]
        if len(ours) == len(theirs) == 1:
            ins[i] = outs[o] = n
            sizes[n] = src[i]
            continue
        major = math.gcd(src[i], dst[o])
        if major > 1:
            ins[i] = n if major == src[i] else (n, f"in{n}")
            outs[o] = n if major == dst[o] else (n, f"out{n}")
            sizes.update({n: major, f"in{n}": src[i] // major, f"out{n}": dst[o] // major})
            even.add(n)
    return tuple(ins), tuple(outs), sizes, even


def regrouped(input: Arg, sizes: Sequence[int], **options: Any) -> Factors:
    """Returns the factors of ``input`` seen with other ``sizes``."""
    shape = resolve(input.shape, sizes)
    ins, outs, known, even = regroup(input.shape, shape)
    return Factors(
        (ins,),
        (outs,),
        known,
        divisible_only=even,
        moves=True,
        shapes=(shape,),
        independent=set(known),
        **options,
    )
