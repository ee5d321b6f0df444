"""Mask tensors of the value graph, evaluated at single places on sizes that a caller chooses.

A grid knows its shape and computes one place when asked, so that a mask of 4096 x 4096 costs nothing. What cannot be
evaluated raises Unclear; nothing is guessed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from kvskill.analyzer.modeling.values import (
    Bound,
    Const,
    External,
    ExtInstance,
    Ref,
    Scalar,
    Tensor,
    Tup,
    Unknown,
    Value,
)
from kvskill.analyzer.modeling.walk import MISSING, Walk

__all__ = ["Grid", "Grids", "Unclear"]

Place = tuple[int, ...]
Number = int | float | bool
LEAST = -3.4e38  # stands for the least number of any float type

_TWO: dict[str, Callable[[Number, Number], Number]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "remainder": lambda a, b: a % b,
    "pow": lambda a, b: a**b,
    "maximum": max,
    "minimum": min,
}
_LOGIC: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "xor": operator.xor,
}
_FILLS: dict[str, Number] = {"zeros": 0.0, "ones": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
_LIKE: dict[str, Number] = {"zeros_like": 0.0, "ones_like": 1.0}
_SAME = frozenset({"contiguous", "clone", "detach", "cpu", "npu", "cuda", "dropout", "pointwise", "requires_grad_"})
_NUMBERS = frozenset({"float", "half", "bfloat16", "double", "int", "long"})
_FLOATS = frozenset({"torch.float", "torch.float32", "torch.float16", "torch.bfloat16", "torch.half", "tensor.dtype"})
_INTS = frozenset({"torch.int", "torch.int32", "torch.int64", "torch.long", "torch.int8", "torch.uint8"})
_VIEWS = frozenset({"view", "getitem", "select", "narrow", "transpose", "permute", "unsqueeze", "squeeze", "expand"})
_DEPTH = 120
_CELLS = 300_000


class Unclear(Exception):  # noqa: N818
    """The value at a place is not known."""


@dataclass(frozen=True)
class Grid:
    """A tensor's sizes and the number or truth value at each place."""

    shape: Place
    at: Callable[[Place], Number]


def _spread(grid: Grid, place: Place) -> Number:
    """The value where `grid` is broadcast to a place of at least its rank."""
    own = place[len(place) - len(grid.shape) :]
    return grid.at(tuple(0 if n == 1 else i for i, n in zip(own, grid.shape, strict=True)))


def _joint(*grids: Grid) -> Place:
    rank = max(len(g.shape) for g in grids)
    out = [1] * rank
    for g in grids:
        for i, n in enumerate(g.shape, rank - len(g.shape)):
            if n != 1 and out[i] not in (1, n):
                raise Unclear
            out[i] = n if n != 1 else out[i]
    return tuple(out)


def _flat(shape: Place, place: Place) -> int:
    out = 0
    for n, i in zip(shape, place, strict=True):
        out = out * n + i
    return out


def _unflat(shape: Place, number: int) -> Place:
    out = []
    for n in reversed(shape):
        out.append(number % n)
        number //= n
    return tuple(reversed(out))


class Grids:
    """Evaluates tensors of one run. `starts` gives the grids of inputs and of other tensors by id; `sizes` the
    runtime axes (B, S, T, C, ...)."""

    def __init__(self, walk: Walk, starts: Mapping[int, Grid], inputs: Mapping[str, Grid], sizes: dict[str, int]):
        self.walk, self.starts, self.inputs, self.sizes = walk, starts, inputs, sizes
        self._made: dict[int, Grid] = {}
        self._order = {id(t): i for i, t in enumerate(walk.tensors)}
        self._later: dict[int, list[Tensor]] = {}
        for t in walk.tensors:
            if t.op.endswith("_") and t.parents and isinstance(t.parents[0], Tensor):
                self._later.setdefault(id(t.parents[0]), []).append(t)
        self._written = {id(obj) for _, _, obj, _ in walk.item_writes if isinstance(obj, Tensor)}
        self._viewed_by: dict[int, list[int]] = {}  # when a view of the tensor was written in place
        for t in walk.tensors:
            if t.op.endswith("_") and t.parents:
                below = t.parents[0]
                while isinstance(below, Tensor) and below.op in _VIEWS and below.parents:
                    below = below.parents[0]
                    self._viewed_by.setdefault(id(below), []).append(self._order[id(t)])

    def grid(self, t: Tensor, depth: int = 0) -> Grid:
        """The grid of a tensor."""
        found = self.starts.get(id(t)) or self._made.get(id(t))
        if found is None:
            if depth > _DEPTH or id(t) in self._written:
                raise Unclear
            found = self._made[id(t)] = self._make(t, depth + 1)
        return found

    def operand(self, value: Value | None, user: Tensor, depth: int = 0) -> Grid:
        """An operand as `user` sees it: after the in-place operations that came before."""
        if isinstance(value, Tensor):
            now = value
            if any(at < self._order.get(id(user), 0) for at in self._viewed_by.get(id(value), ())):
                raise Unclear
            while id(now) not in self.starts:
                before = [t for t in self._later.get(id(now), ()) if self._order[id(t)] < self._order.get(id(user), 0)]
                if not before:
                    break
                now = before[-1] if len(before) == 1 else _raise()
            return self.grid(now, depth)
        number = self.number(value)
        return Grid((), lambda place: number)

    def number(self, value: Value | None) -> Number:
        """A Python number, or that of a tensor of one element, under the sizes of this evaluation."""
        if isinstance(value, Tensor):
            return self._only(self.grid(value))
        if isinstance(value, Const) and isinstance(value.value, (bool, int, float)):
            return value.value
        if isinstance(value, Scalar):
            if value.dim is not None:
                return self._dim(value)
            try:
                return float(value.text)
            except ValueError:
                raise Unclear from None
        if isinstance(value, Ref):
            dim = self.walk.dim_alias.get(value.path)
            known = dim.evaluate(self.sizes) if dim is not None else self.walk.concrete(value.path)
            if known is not MISSING and isinstance(known, (bool, int, float)):
                return known
        if isinstance(value, External) and value.name.rsplit(".", 1)[-1] == "inf":
            return math.inf
        if isinstance(value, Unknown) and value.sources:
            return self._unknown(value)
        raise Unclear

    def _unknown(self, value: Unknown) -> Number:
        """Numbers that the walk does not compute: limits of a type, sums of them, the length of a slice."""
        first = value.sources[0]
        if value.why == "subscript" and isinstance(first, Unknown) and first.why == "shape":
            return self._slice_length(first.sources[0], value.sources[-1])
        if value.why in ("attribute min", "attribute max"):
            if isinstance(first, Unknown) and first.why in ("finfo", "iinfo"):
                return LEAST if value.why.endswith("min") else -LEAST
        elif value.why == "unary":
            return -self.number(first)
        elif value.why in _TWO and len(value.sources) == 2:
            return _TWO[value.why](self.number(first), self.number(value.sources[1]))
        raise Unclear

    def _slice_length(self, t: Value, axis: Value) -> int:
        """`x[:, a:b].shape[1]` of a tensor without known sizes."""
        at = int(self.number(axis))
        while isinstance(t, Tensor) and t.parents and "parts" not in t.attrs:
            if t.op == "repeat_interleave":  # along another axis
                given, named = _given(t)
                if int(self.number(named.get("dim", given[2] if len(given) > 2 else None))) == at:
                    raise Unclear
            elif t.op not in _SAME | _NUMBERS | {"to"}:
                raise Unclear
            t = t.parents[0]
        parts = t.attrs.get("parts") if isinstance(t, Tensor) else None
        if parts is None or not 0 <= at < len(parts) or any(not isinstance(p, slice) for p in parts[: at + 1]):
            raise Unclear
        if parts[at].stop is None or parts[at].step is not None:
            raise Unclear
        start = int(self.number(parts[at].start)) if parts[at].start is not None else 0
        length = int(self.number(parts[at].stop)) - start
        return length if start >= 0 and length > 0 else _raise()

    def _dim(self, value: Scalar) -> int:
        dim = self.walk.as_dim(value)
        if dim is None:
            raise Unclear
        env = dict(self.sizes)
        for atom in dim.atoms - env.keys():
            if atom in self.walk.extremes:
                name, dims = self.walk.extremes[atom]
                env[atom] = (max if name == "max" else min)(self._dim(Scalar(str(d), d)) for d in dims)
                continue
            if atom in self.walk.measured:
                env[atom] = int(self._only(self.grid(self.walk.measured[atom])))
                continue
            known = self.walk.dim_env.get(atom, MISSING)
            known = self.walk.concrete(atom) if known is MISSING else known
            if known is MISSING or isinstance(known, bool) or not isinstance(known, int):
                raise Unclear
            env[atom] = known
        number = dim.evaluate(env)
        if number is None:
            raise Unclear
        return number

    @staticmethod
    def _only(grid: Grid) -> Number:
        """The one element of a grid."""
        if math.prod(grid.shape) != 1:
            raise Unclear
        return grid.at((0,) * len(grid.shape))

    def sizes_of(self, t: Tensor) -> Place:
        """The sizes that the walk knows; raises where one is not known."""
        if t.shape is None:
            raise Unclear
        return tuple(self._dim(Scalar(str(dim), dim)) for dim in t.shape)

    def _ints(self, values: list[Value]) -> list[int]:
        if len(values) == 1 and isinstance(values[0], Tup) and values[0].shape_of is not None:
            own = self.grid(values[0].shape_of).shape
            if len(own) == len(values[0].items):
                return list(own)
        items = values[0].items if len(values) == 1 and isinstance(values[0], Tup) else values
        return [int(self.number(v)) for v in items]

    # -- operations ------------------------------------------------------------------------------------------

    def _make(self, t: Tensor, depth: int) -> Grid:
        op = t.op[:-1] if t.op.endswith("_") and not t.op.endswith("__") else t.op
        if op.startswith("input:"):
            found = self.inputs.get(op)
            if found is None or (t.rank is not None and t.rank != len(found.shape)):
                raise Unclear
            return found
        if "parts" in t.attrs:
            return self._getitem(t, depth)
        logic = op.split("_", 1)[1] if op.startswith(("logical_", "bitwise_")) else op
        if logic in _LOGIC:
            return self._logic(t, _LOGIC[logic], depth)
        if op in _TWO:
            return self._two(t, _TWO[op], depth)
        if logic in ("not", "invert"):
            inner = self.operand(t.parents[0], t, depth)
            return Grid(inner.shape, lambda place: not _truth(inner.at(place)))
        if op in _SAME:
            return self.operand(t.parents[0], t, depth)
        made = getattr(self, f"_op_{op}", None) or self._named(op)
        if made is None:
            raise Unclear
        result: Grid = made(t, depth)
        return result

    def _named(self, op: str) -> Callable[[Tensor, int], Grid] | None:
        groups: tuple[tuple[frozenset[str] | set[str], Callable[[Tensor, int], Grid]], ...] = (
            (_FILLS.keys() | _LIKE.keys() | {"full", "full_like", "new_full"}, self._filled),
            (_NUMBERS | {"to", "type", "type_as", "bool"}, self._cast),
            ({"tril", "triu"}, self._triangle),
            ({"transpose", "permute", "movedim"}, self._moved),
            ({"unsqueeze", "squeeze", "view", "view_as", "flatten"}, self._viewed),
            ({"expand", "expand_as", "repeat"}, self._repeated),
            ({"cat", "concat", "stack"}, self._joined),
            ({"select", "index_select", "narrow"}, self._picked),
            ({"max", "min", "amax", "amin"}, self._reduced),
        )
        return next((rule for names, rule in groups if op in names), None)

    def _two(self, t: Tensor, rule: Callable[[Number, Number], Number], depth: int) -> Grid:
        a, b = (self._factor(t, i, depth) for i in (0, 1))
        return Grid(_joint(a, b), lambda place: _finite(rule, _spread(a, place), _spread(b, place)))

    def _factor(self, t: Tensor, at: int, depth: int) -> Grid:
        """An operand of an operation on the scores; what acts on a whole row alike hides and shows nothing: an unknown
        factor counts as one, a row's maximum that is taken off as zero."""
        value, other = t.parents[at], t.parents[1 - at]
        if isinstance(other, Tensor) and other.stream:
            if t.op == "sub" and at == 1 and _row_extreme(value):
                return Grid((), lambda place: 0.0)
            if t.op in ("mul", "div") and not isinstance(value, Tensor):
                try:
                    return self.operand(value, t, depth)
                except Unclear:
                    return Grid((), lambda place: 1.0)
        return self.operand(value, t, depth)

    def _logic(self, t: Tensor, rule: Callable[[bool, bool], bool], depth: int) -> Grid:
        a, b = self.operand(t.parents[0], t, depth), self.operand(t.parents[1], t, depth)
        return Grid(_joint(a, b), lambda place: rule(_truth(_spread(a, place)), _truth(_spread(b, place))))

    def _op_neg(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        return Grid(inner.shape, lambda place: -inner.at(place))

    def _op_abs(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        return Grid(inner.shape, lambda place: abs(inner.at(place)))

    def _op_where(self, t: Tensor, depth: int) -> Grid:
        if len(t.parents) != 3:
            raise Unclear
        test, a, b = (self.operand(p, t, depth) for p in t.parents)
        return Grid(
            _joint(test, a, b), lambda place: _spread(a, place) if _truth(_spread(test, place)) else _spread(b, place)
        )

    def _op_masked_fill(self, t: Tensor, depth: int) -> Grid:
        base, mask, fill = (self.operand(p, t, depth) for p in t.parents[:3])
        return Grid(
            _joint(base, mask),
            lambda place: _spread(fill, place) if _truth(_spread(mask, place)) else _spread(base, place),
        )

    def _op_outer(self, t: Tensor, depth: int) -> Grid:
        a, b = (self.operand(p, t, depth) for p in t.parents)
        return Grid((*a.shape, *b.shape), lambda place: a.at(place[:1]) * b.at(place[1:]))

    def _op_arange(self, t: Tensor, depth: int) -> Grid:
        bounds = [self.number(p) for p in t.parents if p != Const(None)]
        start = bounds[0] if len(bounds) > 1 else 0
        stop, step = bounds[1] if len(bounds) > 1 else bounds[0], bounds[2] if len(bounds) > 2 else 1
        return Grid((max(0, math.ceil((stop - start) / step)),), lambda place: start + place[0] * step)

    def _op_cumsum(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        given, named = _given(t)
        axis = int(self.number(given[1] if len(given) > 1 else named.get("dim"))) % len(inner.shape)

        def at(place: Place) -> Number:
            return sum(inner.at((*place[:axis], i, *place[axis + 1 :])) for i in range(place[axis] + 1))

        return Grid(inner.shape, at)

    def _op_parameter(self, t: Tensor, depth: int) -> Grid:
        """Weights have a shape and no values here."""
        return Grid(self.sizes_of(t), lambda place: _raise())

    def _op_constant(self, t: Tensor, depth: int) -> Grid:
        given, _ = _given(t)
        if isinstance(given[0], Tup):
            row = [self.number(v) for v in given[0].items]
            return Grid((len(row),), lambda place: row[place[0]])
        value = self.number(given[0])
        return Grid((), lambda place: value)

    def _op_bucketize(self, t: Tensor, depth: int) -> Grid:
        given, named = _given(t)
        keys, edges = (0, 1) if t.op == "bucketize" else (1, 0)
        rows, bounds = self.operand(given[keys], t, depth), self.operand(given[edges], t, depth)
        right = named.get("right", Const(False)) == Const(True)
        if len(bounds.shape) != 1 or bounds.shape[0] > 64:
            raise Unclear

        def at(place: Place) -> Number:
            key = rows.at(place)
            return sum(bounds.at((i,)) <= key if right else bounds.at((i,)) < key for i in range(bounds.shape[0]))

        return Grid(rows.shape, at)

    _op_searchsorted = _op_bucketize

    def _reduced(self, t: Tensor, depth: int) -> Grid:
        """The largest or smallest element of all."""
        inner = self.operand(t.parents[0], t, depth)
        if t.shape != () or not 0 < math.prod(inner.shape) <= _CELLS:
            raise Unclear
        pick = max if t.op.endswith("max") else min
        value = pick(inner.at(_unflat(inner.shape, i)) for i in range(math.prod(inner.shape)))
        return Grid((), lambda place: value)

    def _op_clamp(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        given, named = _given(t)
        low = named.get("min", given[1] if len(given) > 1 else None)
        high = named.get("max", given[2] if len(given) > 2 else None)
        least = self.number(low) if low not in (None, Const(None)) else -math.inf
        most = self.number(high) if high not in (None, Const(None)) else math.inf
        return Grid(inner.shape, lambda place: min(max(inner.at(place), least), most))

    def _op_join(self, t: Tensor, depth: int) -> Grid:
        """One value or another: known where both are the same."""
        a, b = (self.operand(p, t, depth) for p in t.parents)
        if a.shape != b.shape:
            raise Unclear

        def at(place: Place) -> Number:
            one, other = a.at(place), b.at(place)
            return one if one == other else _raise()

        return Grid(a.shape, at)

    def _filled(self, t: Tensor, depth: int) -> Grid:
        given, named = _given(t)
        name = t.op
        if name.endswith("_like"):
            shape = self.operand(given[0], t, depth).shape
            value = _LIKE[name] if name in _LIKE else self.number(named.get("fill_value") or given[1])
        else:
            rest = given[1:] if name.startswith("new_") else given
            if name.endswith("full"):
                shape = tuple(self._ints([named.get("size") or rest[0]]))
                value = self.number(named.get("fill_value") or rest[1])
            else:
                sizes = [named["size"]] if "size" in named else rest
                shape, value = tuple(self._ints(list(sizes))), _FILLS[name]
        kind = named.get("dtype")
        if isinstance(kind, External) and kind.name == "torch.bool":
            value = bool(value)
        return Grid(shape, lambda place: value)

    def _cast(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        kind = t.op
        if kind in ("to", "type", "type_as"):
            given, named = _given(t)
            kind = _kind([*given[1:], *named.values()], by_tensor=kind == "type_as")
        if kind == "bool":
            return Grid(inner.shape, lambda place: _truth(inner.at(place)))
        if kind == "same":
            return inner
        return Grid(inner.shape, lambda place: inner.at(place) + 0.0 if kind == "float" else int(inner.at(place)))

    def _triangle(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        named = [t.attrs.get("diagonal"), *t.parents[1:]]
        shift = next((self.number(v) for v in named if v is not None and v != Const(None)), 0)
        lower = t.op.startswith("tril")

        def at(place: Place) -> Number:
            kept = place[-1] - place[-2] <= shift if lower else place[-1] - place[-2] >= shift
            value = inner.at(place)
            return value if kept else (False if isinstance(value, bool) else 0.0)

        return Grid(inner.shape, at)

    def _moved(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        order = list(range(len(inner.shape)))
        perm = t.attrs.get("perm")
        if t.op == "transpose":
            a, b = perm if perm is not None else (-2, -1)
            order[a], order[b] = order[b], order[a]
        elif perm is not None and len(perm) == len(order):
            order = list(perm)
        else:
            raise Unclear

        def at(place: Place) -> Number:
            back = [0] * len(order)
            for to, axis in enumerate(order):
                back[axis] = place[to]
            return inner.at(tuple(back))

        return Grid(tuple(inner.shape[i] for i in order), at)

    def _viewed(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        shape = self._new_shape(t, inner, depth)
        if math.prod(shape) != math.prod(inner.shape):
            raise Unclear
        return Grid(shape, lambda place: inner.at(_unflat(inner.shape, _flat(shape, place))))

    def _new_shape(self, t: Tensor, inner: Grid, depth: int) -> Place:
        given, named = _given(t)
        rank, rest = len(inner.shape), given[1:]
        if t.op == "unsqueeze":
            axis = int(self.number(rest[0] if rest else named.get("dim"))) % (rank + 1)
            return (*inner.shape[:axis], 1, *inner.shape[axis:])
        if t.op == "squeeze":
            if not rest and "dim" not in named:
                return tuple(n for n in inner.shape if n != 1)
            axis = int(self.number(rest[0] if rest else named.get("dim"))) % rank
            return inner.shape if inner.shape[axis] != 1 else (*inner.shape[:axis], *inner.shape[axis + 1 :])
        if t.op == "view_as":
            return self.operand(rest[0], t, depth).shape
        if t.op == "flatten" or not rest:
            raise Unclear
        sizes = self._ints(list(rest))
        if -1 in sizes:
            others = math.prod(n for n in sizes if n != -1)
            sizes[sizes.index(-1)] = math.prod(inner.shape) // others if others else 0
        return tuple(sizes)

    def _repeated(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        given, _ = _given(t)
        if t.op == "expand_as":
            shape = list(self.operand(given[1], t, depth).shape)
        else:
            shape = self._ints(list(given[1:]))
        wide = (1,) * (len(shape) - len(inner.shape)) + inner.shape
        if t.op == "repeat":
            shape = [n * m for n, m in zip(wide, shape, strict=True)]
        shape = [w if n == -1 else n for n, w in zip(shape, wide, strict=True)]
        lead = len(shape) - len(inner.shape)

        def at(place: Place) -> Number:
            return inner.at(tuple(i % n for i, n in zip(place[lead:], inner.shape, strict=True)))

        return Grid(tuple(shape), at)

    def _joined(self, t: Tensor, depth: int) -> Grid:
        axis = t.attrs.get("axis")
        if axis is None or not t.parents:
            raise Unclear
        parts = [self.operand(p, t, depth) for p in t.parents]
        first = parts[0].shape
        if t.op == "stack":
            return Grid(
                (*first[:axis], len(parts), *first[axis:]),
                lambda place: parts[place[axis]].at((*place[:axis], *place[axis + 1 :])),
            )

        def at(place: Place) -> Number:
            left = place[axis]
            for part in parts:
                if left < part.shape[axis]:
                    return part.at((*place[:axis], left, *place[axis + 1 :]))
                left -= part.shape[axis]
            raise Unclear

        return Grid((*first[:axis], sum(p.shape[axis] for p in parts), *first[axis + 1 :]), at)

    def _picked(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        axis = t.attrs.get("axis")
        if axis is None:
            raise Unclear
        given, named = _given(t)
        if t.op == "narrow":
            start = int(self.number(given[2] if len(given) > 2 else named.get("start")))
            length = int(self.number(given[3] if len(given) > 3 else named.get("length")))
            shape = (*inner.shape[:axis], length, *inner.shape[axis + 1 :])
            return Grid(shape, lambda p: inner.at((*p[:axis], p[axis] + start, *p[axis + 1 :])))
        if t.op == "index_select":
            rows = self.operand(t.parents[1], t, depth)
            shape = (*inner.shape[:axis], rows.shape[0], *inner.shape[axis + 1 :])
            return Grid(shape, lambda p: inner.at((*p[:axis], int(rows.at((p[axis],))), *p[axis + 1 :])))
        index = t.attrs.get("index")
        index = int(self.number(given[2] if len(given) > 2 else named.get("index"))) if index is None else index
        index %= inner.shape[axis]
        return Grid((*inner.shape[:axis], *inner.shape[axis + 1 :]), lambda p: inner.at((*p[:axis], index, *p[axis:])))

    def _getitem(self, t: Tensor, depth: int) -> Grid:
        inner = self.operand(t.parents[0], t, depth)
        parts: list[Value | slice] = list(t.attrs["parts"])
        used = sum(1 for p in parts if not (isinstance(p, Const) and (p.value is None or p.value is ...)))
        whole = [slice(None)] * (len(inner.shape) - used)
        dots = [i for i, p in enumerate(parts) if isinstance(p, Const) and p.value is ...]
        if dots:
            parts[dots[0] : dots[0] + 1] = whole
        else:
            parts.extend(whole)
        shape: list[int] = []
        reads: list[Callable[[Place], int]] = []  # of a place in the result, the index of each axis of the inner grid
        rows: Grid | None = None
        for part in parts:
            at, size = len(shape), inner.shape[len(reads)] if len(reads) < len(inner.shape) else 0
            if isinstance(part, slice):
                span = range(size)[
                    slice(*(None if v is None else int(self.number(v)) for v in (part.start, part.stop, part.step)))
                ]
                shape.append(len(span))
                reads.append(lambda place, at=at, span=span: span[place[at]])  # type: ignore[misc]
            elif isinstance(part, Const) and part.value is None:
                shape.append(1)
            elif isinstance(part, Tensor):
                if rows is not None:
                    raise Unclear
                rows = self.operand(part, t, depth)
                shape.extend(rows.shape)
                count = len(rows.shape)
                reads.append(lambda place, at=at, rows=rows, count=count: int(rows.at(place[at : at + count])))  # type: ignore[misc]
            else:
                index = int(self.number(part))
                if not -size <= index < size:
                    raise Unclear
                reads.append(lambda place, index=index % size: index)  # type: ignore[misc]
        if len(reads) != len(inner.shape):
            raise Unclear
        return Grid(tuple(shape), lambda place: inner.at(tuple(read(place) for read in reads)))


def _given(t: Tensor) -> tuple[tuple[Value, ...], Mapping[str, Value]]:
    """Arguments of the call that made a tensor, the tensor of a method first."""
    given: tuple[tuple[Value, ...], Mapping[str, Value]] | None = t.attrs.get("given")
    if given is None:
        raise Unclear
    return given


def _kind(values: list[Value], *, by_tensor: bool) -> str:
    """bool, int, float, or same: what a cast with these arguments gives."""
    if by_tensor:
        return "float" if values and isinstance(values[0], Tensor) and values[0].stream else _raise()
    kinds = set()
    for value in values:
        name = value.name if isinstance(value, External) else ""
        if name == "torch.bool":
            kinds.add("bool")
        elif name in _FLOATS or (isinstance(value, Tensor) and value.stream):
            kinds.add("float")
        elif name in _INTS:
            kinds.add("int")
        elif not (
            name == "tensor.device"
            or isinstance(value, (Const, Ref, Bound, ExtInstance))
            or (isinstance(value, Unknown) and "device" in value.why)
        ):
            raise Unclear
    if len(kinds) > 1:
        raise Unclear
    return next(iter(kinds), "same")


def _row_extreme(value: Value) -> bool:
    """`x.amax(-1)`, or the first of what `x.max(-1)` gives."""
    if isinstance(value, Bound) and isinstance(value.self_, Tup) and value.func == "values":
        return _row_extreme(value.self_.items[0])
    return isinstance(value, Tensor) and value.op in ("max", "amax") and value.stream


def _truth(value: Number) -> bool:
    return value != 0


def _finite(rule: Callable[[Number, Number], Number], a: Number, b: Number) -> Number:
    try:
        out = rule(a, b)
    except (ZeroDivisionError, OverflowError):
        raise Unclear from None
    if isinstance(out, float) and math.isnan(out):
        raise Unclear
    return out


def _raise() -> NoReturn:
    raise Unclear
