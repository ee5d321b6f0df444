"""Which keys does a query see? The mask between Q.K^T and softmax is evaluated for one request, place by place.

The paged call shows a query at position p the keys (p - W, p], W the window or all. Legacy code that shows others is
found here, whatever its mask is written with; where a part of the mask cannot be evaluated, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvskill.analyzer.modeling.cuts import Span, key_span
from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.grids import Grid, Grids, Number, Unclear
from kvskill.analyzer.modeling.scores import Attend
from kvskill.analyzer.modeling.trace import ancestors
from kvskill.analyzer.modeling.values import Const, Scalar, Tensor
from kvskill.analyzer.modeling.walk import Walk

__all__ = ["Visible", "visible_keys"]

_SIDE = 2048  # the framework hands out one triangle of this size, True where a key is hidden
_HIDDEN = -1e4  # what is added to a score to hide a key
_SPARE = 3  # free places of the cache after the last token
_Shows = Callable[[int, int], bool]
_MOST = 200_000  # a window beyond this is taken on trust


class _Bias(Exception):  # noqa: N818
    """A score gets a number added that neither shows nor hides its key."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class Visible:
    """What one attention shows: `window` keys to each query, None for all before it; or `doubt`, in words.

    Not `whole`: larger windows than the request that was tried are not ruled out.
    """

    window: int | None = None
    doubt: str | None = None
    whole: bool = True
    bias: float | None = None  # a number that the mask adds, and that neither shows nor hides


def visible_keys(walk: Walk, attend: Attend, phase: str, sizes: Iterable[int]) -> Visible | None:
    """What the mask of an attention shows, or None where it cannot be evaluated.

    `sizes`: numbers that may be windows; the request is made longer than the largest. Calls that take their mask from
    `sparse_mode` are not looked at.
    """
    edges = sorted({abs(n) for n in (*sizes, *_sizes(walk, attend)) if 1 < abs(n) <= _MOST})
    found = _visible(walk, attend, phase, edges)
    if found is None and edges and edges[-1] > _SIDE - 8:  # longer than the framework's triangle
        found = _visible(walk, attend, phase, [n for n in edges if n <= _SIDE - 8])
        found = found and Visible(None, found.doubt, whole=False)
    return found


def _visible(walk: Walk, attend: Attend, phase: str, edges: list[int]) -> Visible | None:
    step = _Step(phase == "prefill", (edges[-1] if edges else 2) + 7)
    try:
        shows = _shows(walk, attend, step)
        return None if shows is None else _judge(shows, step, edges)
    except _Bias as bias:
        return Visible(bias=bias.value)
    except (Unclear, RecursionError, TypeError, ValueError, IndexError):
        return None


@dataclass(frozen=True)
class _Step:
    """The prefill of one request of `length` tokens, or the decode step of the last of them."""

    prefill: bool
    length: int

    @property
    def rows(self) -> int:
        return self.length if self.prefill else 1

    @property
    def capacity(self) -> int:
        return self.length + _SPARE

    @property
    def sizes(self) -> dict[str, int]:
        rows = self.rows
        return {"B": 1, "S": rows, "T": rows, "n": 1, "q": 1, "C": self.capacity, "request_offset": 0}

    def positions(self, edges: list[int]) -> list[int]:
        """Query positions to look at, the last one last."""
        last = self.length - 1
        if not self.prefill:
            return [last]
        rows = {0, 1, 2, 3, last - 1, last} | {n + d for n in edges for d in (-1, 0, 1, 2)}
        return sorted(r for r in rows if 0 <= r <= last)


def _judge(shows: _Shows, step: _Step, edges: list[int]) -> Visible:
    """Compare with (p - W, p] at the places where windows, chunks and triangles differ from it."""
    rows = step.positions(edges)
    last = rows[-1]
    seen = [k for k in _keys(last, edges, step) if shows(last, k)]
    if not seen:
        return Visible(doubt=f"with a mask that shows the query at position {last} no key at all")
    first = min(seen)
    while first > 0 and shows(last, first - 1):  # to the edge, where the numbers did not name it
        first -= 1
    window = None if first == 0 else last - first + 1
    for row in rows:
        low = 0 if window is None else max(0, row - window + 1)
        for key in sorted({*_keys(row, edges, step), max(low - 1, 0), low}):
            wanted = low <= key <= row
            if shows(row, key) is not wanted:
                what = "hides" if wanted else "shows"
                why = "its own token" if key == row else f"the {'later' if key > row else 'earlier'} key {key}"
                of = "" if window is None else f" (the last query sees {window} keys)"
                return Visible(window, f"with a mask that {what} the query at position {row} {why}{of}")
    return Visible(window)


def _keys(row: int, edges: list[int], step: _Step) -> list[int]:
    near = {0, 1, 2, row - 2, row - 1, row, row + 1, row + 2, step.length - 1}
    for n in edges:
        near |= {row - n + d for d in (-2, -1, 0, 1, 2)} | {row // n * n + d for d in (-1, 0, 1)}
    return sorted(k for k in near if 0 <= k < step.capacity)


def _shows(walk: Walk, attend: Attend, step: _Step) -> _Shows | None:
    """Does the query at position p see key k? None where nothing says it."""
    starts: dict[int, Grid] = {}
    grids = _grids(walk, starts, step)
    span = key_span(attend.k, grids)
    shows = _masked(attend, starts, grids, step, span)
    if span.start == 0:
        return shows
    if shows is None:  # all that is read, up to the token
        return lambda p, k: span.start <= k <= p
    return lambda p, k: k >= span.start and shows(p, k - span.start)


def _masked(attend: Attend, starts: dict[int, Grid], grids: Grids, step: _Step, span: Span) -> _Shows | None:
    """What the mask shows, by the place of a key among those that are read."""
    if attend.kind == "eager" and attend.scores is not None and attend.logits is not None:
        if not _rows_and_keys(attend.scores):
            return None
        keys = _key_count(attend.scores, -1, grids, step, span)
        return _by_logits(attend, attend.scores, attend.logits, keys, starts, grids, step)
    if attend.kind == "sdpa" and attend.masks:
        return _by_mask(attend, attend.masks[0], _key_count(attend.k, -2, grids, step, span), grids, step)
    if attend.kind == "sdpa" and attend.causal == Const(True):
        return lambda p, k: k <= (p if step.prefill else 0)  # its triangle starts at the upper left
    if attend.kind == "sdpa" and not step.prefill and attend.causal in (None, Const(False), Const(None)):
        return _limited(lambda p, k: True, _key_count(attend.k, -2, grids, step, span), step)
    return None


def _rows_and_keys(scores: Tensor) -> bool:
    """Are the last two axes of the product queries and keys, in this order?"""
    if scores.op == "matmul":
        return True
    terms = str(scores.attrs.get("equation") or "").replace(" ", "").split("->")
    pair = terms[0].split(",")
    if len(terms) != 2 or len(pair) != 2 or len(terms[1]) < 2:
        return False
    row, key = terms[1][-2], terms[1][-1]
    return row in pair[0] and row not in pair[1] and key in pair[1] and key not in pair[0]


def _grids(walk: Walk, starts: dict[int, Grid], step: _Step) -> Grids:
    rows, last = step.rows, step.length - 1
    inputs: dict[str, Grid] = {"input:attention_mask": Grid((_SIDE, _SIDE), lambda place: place[1] > place[0])}
    for t in walk.tensors:
        if t.op == "input:position_ids" and t.shape is not None:  # packed forms have one axis, padded ones two
            lead = (1,) * (len(t.shape) - 1)
            inputs[t.op] = Grid((*lead, rows), lambda place: place[-1] if step.prefill else last)
    one = {"actual_seq_lengths_kv": last + 1, "actual_seq_lengths_cu_kv": last + 1}
    one |= {"actual_seq_lengths_q": rows, "actual_seq_lengths_cu_q": rows}
    if not step.prefill:
        one["kv_len"] = last
    for name, number in one.items():
        inputs[f"input:{name}"] = Grid((1,), lambda place, number=number: number)  # type: ignore[misc]
    return Grids(walk, starts, inputs, step.sizes)


def _key_count(t: Tensor, axis: int, grids: Grids, step: _Step, span: Span) -> int:
    """The keys on an axis: all places of the cache, or those that the code cuts it to."""
    dim = t.shape[axis] if t.shape is not None else None
    count = None
    if span.stop is not None:
        count = min(span.stop, step.capacity) - span.start
    elif dim is None:
        raise Unclear
    if dim is None:
        assert count is not None
        return count
    try:
        return int(grids.number(Scalar(str(dim), dim))) if count is None or not dim.wild else count
    except Unclear:
        if count is None:  # cut by a value that is not known, or sized by a setting that nobody gave
            count = (step.length if dim.wild else step.capacity) - span.start
        unknown = sorted(dim.atoms - grids.sizes.keys())
        if dim.evaluate({**grids.sizes, **dict.fromkeys(unknown[1:], 0), **dict.fromkeys(unknown[:1], count)}) == count:
            grids.sizes.update({a: 0 if i else count for i, a in enumerate(unknown)})  # a sum of them is the count
        return count


def _size(dim: Dim, grids: Grids) -> int:
    try:
        return int(grids.number(Scalar(str(dim), dim)))
    except Unclear:
        return 1


def _by_logits(
    attend: Attend, scores: Tensor, logits: Tensor, keys: int, starts: dict[int, Grid], grids: Grids, step: _Step
) -> _Shows:
    """Scores that are all zero go through the same operations; what ends far below zero is hidden."""
    if scores.shape is None:
        raise Unclear
    zero = Grid((*(_size(d, grids) for d in scores.shape[:-2]), step.rows, keys), lambda place: 0.0)
    for t in ancestors([logits]):
        if t is scores or (t.op == scores.op and t.stream and t.rank == scores.rank):
            starts[id(t)] = zero  # the second half of a score that is the sum of two products is zero too
    grid = grids.operand(logits, attend.out)
    lead = (0,) * (len(grid.shape) - 2)
    return _limited(lambda p, k: _seen(grid.at((*lead, p, k))), keys, step)


def _by_mask(attend: Attend, mask: Tensor, keys: int, grids: Grids, step: _Step) -> _Shows:
    """The mask of F.scaled_dot_product_attention: True shows, a number is added."""
    grid = grids.operand(mask, attend.out)
    height, width = (1, *grid.shape)[-2:]
    if height not in (1, step.rows) or width not in (1, keys):
        raise Unclear

    def shows(p: int, k: int) -> bool:
        place = (*(0 for _ in grid.shape[:-2]), p if height > 1 else 0, k if width > 1 else 0)
        value = grid.at(place[-len(grid.shape) :])
        return value if isinstance(value, bool) else _seen(value)

    return _limited(shows, keys, step)


def _limited(shows: _Shows, keys: int, step: _Step) -> _Shows:
    """A decode step has one row; keys beyond the last are not there."""
    return lambda p, k: k < keys and shows(p if step.prefill else 0, k)


def _seen(value: Number) -> bool:
    if value <= _HIDDEN:
        return False
    if abs(value) < 1e-6:
        return True
    raise _Bias(float(value))


def _sizes(walk: Walk, attend: Attend) -> set[int]:
    """Numbers in the mask that may be windows or chunks."""
    out = set()
    for t in ancestors([*attend.masks, *([attend.logits] if attend.logits is not None else [])]):
        for p in t.parents:
            dim = walk.as_dim(p) if not isinstance(p, Tensor) else None
            number = walk.concrete_dim(dim) if dim is not None else None
            if number is not None:
                out.add(number)
    for dim in [d for _, dims in walk.extremes.values() for d in dims]:  # `max(end - W, 0)`
        out |= {abs(coef) for mono, coef in dim.terms if not mono}
        out |= {n for n in (walk.concrete_dim(Dim.atom(a)) for a in dim.atoms if "?" not in a) if n is not None}
    return out
