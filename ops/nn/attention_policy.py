"""How attention over a split sequence communicates: the policies that a user may select, and the
automatic choice.

    gather   k and v are gathered: a rank has all keys for its queries
    ring     pieces of k and v are passed around a ring (``ring_attention.py``)
    heads    q, k and v are exchanged so that a rank has the full sequence of some heads
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from disttensor.core.layout import Layout
from disttensor.settings import Setting

POLICIES = ("auto", "gather", "ring", "heads")
KEPT = 16 << 20  # bytes of k and v of one call that a rank may keep whole for its backward


class policy(Setting, allowed=POLICIES, default="auto"):
    """``with attention.policy("ring"):`` chooses how ``scaled_dot_product_attention`` is carried
    out where the sequence of q, k and v is split over one mesh axis or several.

    "gather": k and v are gathered. "ring": pieces of k and v are passed around the ranks. "heads":
    an all-to-all gives each rank the full sequence of some heads, and another one returns the
    result. "auto", the default, considers the policies that keep at most 16 MiB of k and v, or no
    more than the policy that keeps least. Of these it chooses the one that sends the fewest bytes;
    ``explain`` prints the choice. The result has the placements of q in all cases. All ranks set
    the same policy. Raises ValueError for another name.

    >>> q = dt.ones(1, 2, 8, 4, mesh=mesh, placements=[dt.Shard(2), dt.Replicate()])
    >>> with dt.attention.policy("ring"):
    ...     y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> y.spec
    f32[1, 2, 8@dp, 4]
    """


def setting(layouts: Collection[Layout]) -> Callable[[], str] | None:
    """Returns the policy if a sequence is split, else None."""
    return policy.current if any(len(x.dims) > 1 and x.dims[-2] for x in layouts) else None


class Sizes(NamedTuple):
    """Bytes of q, k, v and the result of a call, after splits by other axes, over n ranks."""

    q: float
    k: float
    v: float
    out: float
    n: int
    causal: bool

    def forward(self, way: str) -> float:
        """Returns the bytes that one rank sends in the forward."""
        n, keys = self.n, self.k + self.v
        every = self.q + keys + self.out
        if way == "heads":  # the all-to-alls there and back
            return every / n * (n - 1) / n
        dealt = every / n if way == "ring" and self.causal else 0.0  # see ring_attention
        return keys * (n - 1) / n + dealt

    def sent(self, way: str) -> float:
        """Returns the bytes that one rank sends, forward and backward. The backward sends as much
        as the forward; with a ring it also sends the blocks again, with their gradients."""
        again = (self.k + self.v) * (self.n - 1) / self.n if way == "ring" else 0.0
        return 2 * self.forward(way) + again

    def kept(self, way: str) -> float:
        """Returns the bytes of k and v that one rank keeps for the backward."""
        return (self.k + self.v) / (1 if way == "gather" else self.n)


class Choice(NamedTuple):
    """``way``: "gather", "ring" or "heads"; ``why``, for people."""

    way: str
    why: str


def choose(sizes: Sizes, possible: Collection[str]) -> Choice:
    """Returns the way that "auto" chooses from the possible ways."""
    least = min(map(sizes.kept, possible))
    fit = [way for way in possible if sizes.kept(way) <= max(KEPT, least)]
    best = min(fit, key=lambda way: (sizes.sent(way), sizes.kept(way)))
    figures = "; ".join(
        f"{way} {sizes.sent(way):,.0f} and {sizes.kept(way):,.0f}" for way in possible
    )
    return Choice(best, f"bytes that a rank sends there and back, and keeps of k and v: {figures}")
