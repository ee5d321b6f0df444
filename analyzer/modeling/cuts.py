"""Which places of a cache does the code read? A cache that is cut on its way to the attention."""

from __future__ import annotations

from dataclasses import dataclass

from kvskill.analyzer.modeling.grids import Grids, Unclear
from kvskill.analyzer.modeling.trace import PASSING
from kvskill.analyzer.modeling.values import Const, Tensor, Tup, Value

__all__ = ["Cut", "Span", "key_span", "token_cuts"]


@dataclass(frozen=True)
class Span:
    """Places that are read: from `start` on, up to `stop` where the code says so."""

    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Cut:
    """One index on a token axis: a slice, or anything else in `other`."""

    where: Tensor
    start: Value | None = None
    stop: Value | None = None
    other: bool = False


def token_cuts(k: Tensor) -> list[Cut] | None:
    """Cuts between a cache and the tensor that is attended, nearest the cache first; None where it is not a cache."""
    out: list[Cut] = []
    t: Value | None = k
    for _ in range(60):
        if not isinstance(t, Tensor):
            return None
        if t.op == "cache":
            return out[::-1]
        if t.op in ("index_select", "gather"):
            out.append(Cut(t, other=True))
        elif t.op == "narrow" and t.attrs.get("axis") not in (0, None):
            given, named = t.attrs.get("given", ((), {}))
            start = given[2] if len(given) > 2 else named.get("start")
            out.append(Cut(t, start, None, other=start != Const(0)))
        elif "parts" in t.attrs:
            out.extend(_index_cuts(t))
        elif t.op not in PASSING:
            return None
        t = t.parents[0] if t.parents and t.op != "join" else None
    return None


def _index_cuts(t: Tensor) -> list[Cut]:
    """Cuts of `cache[...]`: on any axis but the first, heads and sizes that are cut from their start aside."""
    base = t.parents[0]
    shape = base.shape if isinstance(base, Tensor) else None
    parts = t.attrs["parts"]
    used = sum(1 for p in parts if not (isinstance(p, Const) and (p.value is None or p.value is ...)))
    out, axis = [], 0
    for part in parts:
        if isinstance(part, Const) and part.value is None:
            continue
        if isinstance(part, Const) and part.value is ...:
            axis += len(shape) - used if shape is not None else 9
            continue
        here, axis = axis, axis + 1
        if here == 0 and not (shape is not None and len(shape) == 1):
            continue
        if isinstance(part, slice):
            start = None if part.start == Const(0) else part.start
            if start is None and part.stop is None and part.step is None:
                continue
            sized = shape is not None and here < len(shape) and shape[here].value is not None
            if start is None and part.step is None and sized:
                continue
            out.append(Cut(t, start, part.stop, other=part.step not in (None, Const(1))))
        elif isinstance(part, (Tensor, Tup)):
            out.append(Cut(t, other=True))
    return out


def key_span(k: Tensor, grids: Grids) -> Span:
    """The places that are read, in numbers. Raises Unclear where they are not a span of known ends."""
    cuts = token_cuts(k)
    if not cuts:
        return Span()
    if len(cuts) > 1 or cuts[0].other:
        raise Unclear
    (cut,) = cuts
    start = int(grids.number(cut.start)) if cut.start is not None else 0
    stop = None
    if cut.stop is not None:
        try:
            stop = int(grids.number(cut.stop))
        except Unclear:
            if cut.start is not None:
                raise
    if start < 0 or (stop is not None and stop <= start):
        raise Unclear
    return Span(start, stop)
