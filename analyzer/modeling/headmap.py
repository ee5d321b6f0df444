"""Which key head does each query head attend to? The fused operator pairs head h with key head h // group.

Legacy code that repeats or groups heads in another order (tiles them, splits the group first) computes something
else. The rearrangements between the fresh queries, keys, values and the product are replayed on small arrays that
hold the number of the head in each place.
"""

from __future__ import annotations

import math
from itertools import product as cells

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.scores import Attend
from kvskill.analyzer.modeling.shapes import ELEMENTWISE, LAYOUT
from kvskill.analyzer.modeling.trace import layout_of, tensor_parents
from kvskill.analyzer.modeling.values import Tensor
from kvskill.analyzer.modeling.walk import Walk

__all__ = ["wrong_pairs"]

_RUNTIME = {"B": 1, "S": 2, "T": 2, "C": 2, "n": 1, "q": 1}
# may change how many tokens there are
_TOKENS = frozenset({"narrow", "getitem", "join", "where", "filled", "index_select", "masked_fill"})
_SAME = ELEMENTWISE | LAYOUT | _TOKENS | {"written", "select"}
_LIMIT = 1 << 17


class Heads:
    """An array of head numbers: flat, row-major."""

    def __init__(self, shape: list[int], flat: list[int]) -> None:
        self.shape, self.flat = shape, flat

    def moved(self, order: list[int]) -> Heads:
        shape = [self.shape[i] for i in order]
        steps = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        flat = [
            self.flat[sum(i * steps[a] for i, a in zip(at, order, strict=True))]
            for at in cells(*(range(n) for n in shape))
        ]
        return Heads(shape, flat)

    def spread(self, shape: list[int], index: list[list[int]]) -> Heads:
        """Every axis read through `index[axis]` (repeats)."""
        steps = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        flat = [
            self.flat[sum(index[a][i] * steps[a] for a, i in enumerate(at))] for at in cells(*(range(n) for n in shape))
        ]
        return Heads(shape, flat)

    def at(self, place: list[int]) -> int:
        out = 0
        for size, i in zip(self.shape, place, strict=True):
            out = out * size + (i if size > 1 else 0)
        return self.flat[out]


class _Replay:
    def __init__(self, walk: Walk, starts: dict[int, Heads]) -> None:
        self.walk, self.starts = walk, starts

    def shape(self, t: Tensor, total: int | None = None) -> list[int] | None:
        return _concrete(self.walk, t.shape, total)

    def of(self, t: Tensor, depth: int = 0) -> Heads | None:
        if id(t) in self.starts:
            return self.starts[id(t)]
        if depth > 60 or t.op not in _SAME | {"repeat", "repeat_interleave"}:
            return None
        for parent in tensor_parents(t):
            below = self.of(parent, depth + 1)
            if below is not None:
                return self._step(t, below)
        return None

    def _step(self, t: Tensor, below: Heads) -> Heads | None:
        rank = len(below.shape)
        if t.op in ("transpose", "permute", "movedim"):
            perm = t.attrs.get("perm")
            order = list(range(rank))
            if t.op == "transpose":
                a, b = perm if perm is not None else (rank - 2, rank - 1)
                order[a], order[b] = order[b], order[a]
            elif perm is not None and len(perm) == rank:
                order = list(perm)
            else:
                return None
            return below.moved(order)
        if t.op == "repeat_interleave":
            axis, shape = t.attrs.get("axis"), self.shape(t)
            if axis is None or shape is None or len(shape) != rank or shape[axis] % below.shape[axis]:
                return None
            times = shape[axis] // below.shape[axis]
            index = [list(range(n)) for n in below.shape]
            index[axis] = [i // times for i in range(shape[axis])]
            return below.spread([len(i) for i in index], index)
        if t.op in ("expand", "expand_as", "repeat"):
            shape = self.shape(t)
            if shape is None or len(shape) < rank or math.prod(shape) > _LIMIT:
                return None
            wide = Heads([1] * (len(shape) - rank) + below.shape, below.flat)
            if any(n % w for n, w in zip(shape, wide.shape, strict=True)):
                return None
            index = [[i % w for i in range(n)] for n, w in zip(shape, wide.shape, strict=True)]
            return wide.spread(shape, index)
        shape = self.shape(t, len(below.flat))
        if shape is not None and math.prod(shape) == len(below.flat):
            return Heads(shape, below.flat)
        # some of the tokens: any number of them shows the same heads
        return below if shape is not None and len(shape) == rank and t.op in _TOKENS else None


def _concrete(walk: Walk, shape: tuple[Dim, ...] | None, total: int | None = None) -> list[int] | None:
    """The shape in numbers; one size that is not known follows from the total, others stand for two tokens."""
    if shape is None:
        return None
    out: list[int | None] = []
    for dim in shape:
        env = dict(_RUNTIME)
        for atom in dim.atoms:
            if atom not in env and "?" not in atom and (value := walk.concrete_dim(Dim.atom(atom))) is not None:
                env[atom] = value
        out.append(dim.evaluate(env))
    holes = [i for i, n in enumerate(out) if n is None]
    if len(holes) == 1 and total is not None:
        rest = math.prod(n for n in out if n is not None)
        out[holes[0]] = total // rest if rest and total % rest == 0 else 2
    return [2 if n is None else n for n in out]


def _start(walk: Walk, t: Tensor, kind: str, heads: int, dim: int) -> Heads | None:
    """Head numbers of a tensor whose axes are known; flattened heads are one head after the other."""
    shape = _concrete(walk, t.shape)
    if shape is None or math.prod(shape) > _LIMIT:
        return None
    axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}.get(kind)
    width = 1 if axis is not None else dim
    axis = len(shape) - 1 if axis is None else axis
    if axis >= len(shape) or shape[axis] != heads * width:
        return None
    return _numbered(shape, kind, dim)


def _numbered(shape: list[int], kind: str, dim: int) -> Heads:
    axis = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}.get(kind)
    width = 1 if axis is not None else dim
    axis = len(shape) - 1 if axis is None else axis
    inner = math.prod(shape[axis + 1 :])
    return Heads(shape, [(i // inner) % shape[axis] // width for i in range(math.prod(shape))])


def _cache_kind(walk: Walk, t: Tensor, heads: int, dim: int) -> str | None:
    """How a cache lies: the axes whose sizes are settings tell themselves."""
    sizes = [walk.concrete_dim(d) for d in t.shape or ()]
    if len(sizes) == 4 and sizes[3] == dim and (sizes[1] == heads) != (sizes[2] == heads):
        return "BSND" if sizes[2] == heads else "BNSD"
    return "BSH" if len(sizes) == 3 and sizes[2] == heads * dim else None


def wrong_pairs(
    walk: Walk, attend: Attend, q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int, int, int], seq: Dim, batch: Dim
) -> str | None:
    """What is wrong with the pairing of heads, or None (also where there is one key head for each or for all).

    `q`, `k`, `v`: the fresh tensors that the paged code will read; `sizes`: query heads, key heads, key and value size.
    """
    if attend.kind.startswith("fa"):
        return None
    n_q, n_kv, k_dim, v_dim = sizes
    starts: dict[int, Heads] = {}
    for t, heads, dim in ((q, n_q, k_dim), (k, n_kv, k_dim), (v, n_kv, v_dim)):
        layout = layout_of(walk, t, seq, batch)
        found = _start(walk, t, layout.kind, heads, dim) if layout is not None else None
        if found is not None:
            starts[id(t)] = found
    for t in walk.tensors:
        if t.op == "cache" and (kind := _cache_kind(walk, t, n_kv, k_dim)) is not None:
            shape = {"BSND": [1, 2, n_kv, k_dim], "BNSD": [1, n_kv, 2, k_dim], "BSH": [1, 2, n_kv * k_dim]}[kind]
            starts[id(t)] = _numbered(shape, kind, k_dim)
    replay = _Replay(walk, starts)
    left, right, value = replay.of(attend.q), replay.of(attend.k), replay.of(attend.v)
    group = max(n_q // n_kv, 1)
    if left is None or right is None:
        return "how a query head finds its key head could not be followed" if group > 1 and n_kv > 1 else None
    if attend.kind == "sdpa" or attend.scores is None or attend.scores.op == "matmul":
        pairs = _matmul_pairs(left, right)
    else:
        pairs = _einsum_pairs(str(attend.scores.attrs.get("equation") or ""), left, right)
    for query_head, key_head in pairs:
        if key_head != query_head // group:
            return f"query head {query_head} attends key head {key_head}, not {query_head // group}"
    if value is not None and len(value.shape) == len(right.shape):
        order, other = _in_order(right), _in_order(value)
        if len(order) == len(other) and order != other:
            return "keys and values are repeated in different orders"
    return None


def _in_order(h: Heads) -> list[int]:
    """Head numbers of the leading axes (all but the last two)."""
    lead = h.shape[:-2]
    return [h.at([*at, 0, 0]) for at in cells(*(range(n) for n in lead))]


def _matmul_pairs(left: Heads, right: Heads) -> list[tuple[int, int]]:
    lead_l, lead_r = left.shape[:-2], right.shape[:-2]
    rank = max(len(lead_l), len(lead_r))
    lead_l = [1] * (rank - len(lead_l)) + lead_l
    lead_r = [1] * (rank - len(lead_r)) + lead_r
    if any(a != b and 1 not in (a, b) for a, b in zip(lead_l, lead_r, strict=True)):
        return []  # scaled_dot_product_attention(enable_gqa=True): head h with h // group, as the operator
    out = []
    for at in cells(*(range(max(a, b)) for a, b in zip(lead_l, lead_r, strict=True))):
        place_l, place_r = list(at)[rank - len(left.shape) + 2 :], list(at)[rank - len(right.shape) + 2 :]
        out.append((left.at([*place_l, 0, 0]), right.at([*place_r, 0, 0])))
    return out


def _einsum_pairs(equation: str, left: Heads, right: Heads) -> list[tuple[int, int]]:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if len(terms) != 2 or len(terms[0]) != len(left.shape) or len(terms[1]) != len(right.shape):
        return []
    sizes = dict(zip(terms[0], left.shape, strict=True)) | dict(zip(terms[1], right.shape, strict=True))
    out_term = equation.replace(" ", "").split("->")[-1]
    letters = [c for c in sizes if c in out_term]
    out = []
    for at in cells(*(range(sizes[c]) for c in letters)):
        place = dict(zip(letters, at, strict=True))
        out.append((left.at([place.get(c, 0) for c in terms[0]]), right.at([place.get(c, 0) for c in terms[1]])))
    return out
