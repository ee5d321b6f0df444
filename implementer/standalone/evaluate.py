"""Evaluates expressions of a runner as formulas; `None` is what is not known."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from kvskill.analyzer.runner.files import leaf
from kvskill.implementer.standalone.formulas import (
    Arange,
    Counted,
    Grid,
    Num,
    Seq,
    Tok,
    Value,
    alike,
    is_mask,
    key,
    last_axis,
    minus_one,
    num,
    shape_of,
    tensor,
    uniform,
    whole,
)

__all__ = ["Evaluator"]

_P, _L = num(P=1), num(L=1)
_SAME = frozenset(
    ("to", "long", "int", "float", "contiguous", "clone", "detach", "cpu", "npu", "cuda", "type", "type_as", "copy")
)
_RESHAPED = frozenset(
    ("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "repeat", "flatten", "view_as", "tile", "tolist",
     "numpy", "item", "repeat_interleave", "as_tensor", "asarray", "broadcast_to")
)
_ZEROS, _ONES = ("zeros", "zeros_like", "new_zeros"), ("ones", "ones_like", "new_ones")
_FULL = ("full", "full_like", "new_full")
_LIBRARIES = ("torch", "np", "numpy", "math", "F", "functional")


class Evaluator:
    """Expressions in the state `env`.

    `tokenizer` says which calls give tokens and their mask; `column` is an expression of one column of tokens.
    """

    def __init__(self, tokenizer: Callable[[ast.Call], bool] | None, column: ast.expr | None) -> None:
        self.tokenizer = tokenizer
        self.one = key(column)
        self.env: dict[str, Value] = {}

    def eval(self, e: ast.expr | None) -> Value:
        """What the expression gives in the present state."""
        if isinstance(e, ast.Constant):
            if isinstance(e.value, (bool, str)):
                return e.value
            return num(e.value) if isinstance(e.value, int) else None
        if isinstance(e, (ast.Name, ast.Attribute)) and (name := key(e)) is not None:
            held = self.env.get(name)
            return Grid("other", num(1)) if held is None and name == self.one else held
        if isinstance(e, ast.Attribute):
            return self._field(self.eval(e.value), e.attr)
        if isinstance(e, ast.Subscript):
            return self._item(self.eval(e.value), e.slice)
        if isinstance(e, ast.UnaryOp):
            return self._unary(e)
        if isinstance(e, ast.BinOp):
            return self._arith(e.op, self.eval(e.left), self.eval(e.right))
        if isinstance(e, ast.Compare) and len(e.ops) == 1:
            return self._compared(self.eval(e.left), e.ops[0], e.comparators[0])
        if isinstance(e, (ast.List, ast.Tuple)):
            return Seq(tuple(self.eval(x) for x in e.elts))
        if isinstance(e, ast.DictComp):
            return self._copied(e)
        if isinstance(e, (ast.ListComp, ast.GeneratorExp)):
            return Seq((self._inner(e),), many=True)
        if isinstance(e, ast.IfExp):
            test = self.eval(e.test)
            if isinstance(test, bool):
                return self.eval(e.body if test else e.orelse)
            a, b = self.eval(e.body), self.eval(e.orelse)
            return a if alike(a, b) else None
        return self._call(e) if isinstance(e, ast.Call) else None

    def _inner(self, e: ast.ListComp | ast.GeneratorExp) -> Value:
        """An item of a comprehension; its own names are not known."""
        own = {n.id for g in e.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        now = self.env
        self.env = {k: v for k, v in now.items() if k not in own}
        held = self.eval(e.elt)
        self.env = now
        return held

    def _field(self, base: Value, name: str) -> Value:
        if isinstance(base, Tok):
            return {"input_ids": base.ids, "attention_mask": base.mask}.get(name)
        if name == "shape":
            return shape_of(base)
        if name == "values" and isinstance(base, Seq) and len(base.items) == 2:
            return base.items[0]
        return base if name in ("data", "T", "mT") and isinstance(base, Num) else None

    def _item(self, base: Value, index: ast.expr) -> Value:
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            return self._field(base, index.value) if isinstance(base, Tok) else None
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        if isinstance(base, Seq):
            at = self.eval(index)
            if not isinstance(at, Num) or base.many:
                return base.items[0] if isinstance(at, Num) else None
            inside = not at.terms and -len(base.items) <= at.const < len(base.items)
            return base.items[at.const] if inside else None
        kept = [whole(p) for p in parts]
        behind = len(parts) > 1 and isinstance(parts[-1], ast.Constant) and parts[-1].value is None
        if isinstance(base, (Arange, Counted)) and behind:
            return None  # along another axis
        if all(kept):
            return base
        if isinstance(base, Num):
            return None if base.by_row else base
        last = parts[-1]
        if not all(kept[:-1]) or (len(parts) == 1 and not isinstance(base, Arange)):
            return None
        if isinstance(base, Arange) and isinstance(last, ast.Slice) and last.step is None:
            low = num() if last.lower is None else self.eval(last.lower)
            high = base.stop if last.upper is None else self.eval(last.upper)
            return _cut(base, low, high) if isinstance(low, Num) and isinstance(high, Num | None) else None
        if not minus_one(last):
            return None
        if isinstance(base, Arange) and base.stop is not None:
            return base.stop.plus(num(1), -1)
        return _L.plus(num(base.offset + base.added)) if isinstance(base, Counted) else None

    def _compared(self, held: Value, op: ast.cmpop, other: ast.expr) -> Value:
        """`mask == 0` is the padding; a known bool may be compared with another one."""
        if not isinstance(other, ast.Constant):
            return None
        if isinstance(held, bool) and isinstance(other.value, bool) and isinstance(op, (ast.Is, ast.Eq)):
            return held is other.value
        zero = other.value is not None and not other.value and isinstance(op, ast.Eq)
        return Grid("pad", held.cols) if zero and is_mask(held) else None

    def _unary(self, e: ast.UnaryOp) -> Value:
        held = self.eval(e.operand)
        if isinstance(e.op, ast.USub):
            return num().plus(held, -1) if isinstance(held, Num) else None
        if isinstance(e.op, ast.Not):
            return not held if isinstance(held, bool) else None
        return Grid("pad", held.cols) if isinstance(e.op, ast.Invert) and is_mask(held) else None

    def _arith(self, op: ast.operator, a: Value, b: Value) -> Value:
        if isinstance(op, (ast.Add, ast.Sub)):
            sign = 1 if isinstance(op, ast.Add) else -1
            if isinstance(a, Seq) and isinstance(b, Seq) and sign == 1 and not (a.many or b.many):
                return Seq(a.items + b.items)
            if sign == 1 and isinstance(a, Num) and not isinstance(b, Num):
                a, b = b, a
            if not isinstance(b, Num):
                return None
            if isinstance(a, Num):
                return a.plus(b, sign)
            if isinstance(a, Arange):
                return Arange(a.start.plus(b, sign), a.stop.plus(b, sign) if a.stop is not None else None)
            return replace(a, offset=a.offset + sign * b.const) if isinstance(a, Counted) and not b.terms else None
        if isinstance(op, ast.Mult):
            if isinstance(b, Seq) or (isinstance(b, Counted) and is_mask(a)):
                a, b = b, a
            if isinstance(a, Seq) and len(a.items) == 1 and isinstance(b, Num):
                return Seq(a.items, many=True)
            if isinstance(a, Counted) and is_mask(b):
                return replace(a)  # zero in padding
            if isinstance(a, Num) and isinstance(b, Num) and not (a.terms and b.terms):
                a, b = (b, a) if b.terms else (a, b)
                terms = tuple((s, n * b.const) for s, n in a.terms if b.const)
                return Num(terms, a.const * b.const, a.tensor or b.tensor)
        return None

    def _copied(self, e: ast.DictComp) -> Value:
        """`{k: v.to(device) for k, v in inputs.items()}` keeps the fields."""
        gen = e.generators[0]
        over, names = gen.iter, gen.target.elts if isinstance(gen.target, ast.Tuple) else []
        if not isinstance(over, ast.Call) or leaf(over.func) != "items" or len(names) != 2 or gen.ifs:
            return None
        value = e.value
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SAME:
            value = value.func.value
        same = key(e.key) == key(names[0]) and key(value) == key(names[1]) is not None
        base = self.eval(over.func.value) if isinstance(over.func, ast.Attribute) else None
        return replace(base, plain=True) if same and len(e.generators) == 1 and isinstance(base, Tok) else None

    def _call(self, e: ast.Call) -> Value:
        if self.tokenizer is not None and self.tokenizer(e):
            return Tok(Grid("ids", _P), Grid("mask", _P))
        name = leaf(e.func) or ""
        method = isinstance(e.func, ast.Attribute) and leaf(e.func.value) not in _LIBRARIES
        base: Value
        if method and isinstance(e.func, ast.Attribute):
            base, args = self.eval(e.func.value), list(e.args)
        else:
            base, args = (self.eval(e.args[0]) if e.args else None), list(e.args[1:])
        given = {k.arg: k.value for k in e.keywords if k.arg is not None}
        if name in _ZEROS:
            return Num(tensor=True)
        if name in _ONES:
            last = self.eval(e.args[-1]) if e.args else None
            last = last.items[-1] if isinstance(last, Seq) and last.items and not last.many else last
            width = last.cols if isinstance(last, Grid) else last
            column = isinstance(width, Num) and width.same(num(1))
            return Grid("ones", num(1)) if column else Num((), 1, True)
        if name in _FULL:
            held = self.eval(given.get("fill_value") or (e.args[1] if len(e.args) > 1 else None))
            return tensor(held) if isinstance(held, Num) and not held.by_row else None
        if name in ("arange", "range") and not method:
            return self._arange(e)
        if name in ("cat", "concat", "concatenate"):
            return self._joined(base, given.get("dim") or given.get("axis") or (args[0] if args else None))
        if name in ("tensor", "LongTensor", "IntTensor", "as_tensor") and not method:
            return tensor(uniform(base))
        if name in ("int", "len", "float") and not method:
            return replace(base, tensor=False) if name == "int" and isinstance(base, Num) and not base.by_row else None
        if base is None:
            return None
        name = name[:-1] if method and name.endswith("_") else name
        return self._method(name, base, args, given)

    def _method(self, name: str, base: Value, args: list[ast.expr], given: dict[str, ast.expr]) -> Value:
        """A method, or the function of the same name, of a known value."""
        if isinstance(base, Tok):
            return base if name in _SAME else None
        if name == "get" or (isinstance(base, (Seq, bool, str)) and name not in ("list", "tuple")):
            return None
        if name in ("size", "shape"):
            shape = shape_of(base)
            return self._item(shape, args[0]) if args else shape
        if name in _SAME or name in ("list", "tuple"):
            fresh = name in ("clone", "copy") and isinstance(base, (Num, Arange, Counted, Grid))
            return replace(base) if fresh and not isinstance(base, (Tok, Seq, bool, str)) and base is not None else base
        if name == "bool":
            return base if isinstance(base, Grid) else None
        if name in _RESHAPED:
            return self._reshaped(name, base, args)
        axis = given.get("dim") or given.get("axis") or (args[0] if args else None)
        if name in ("max", "amax", "min", "amin") and isinstance(base, Num):
            return None if base.by_row else base if axis is None or name[0] == "a" else Seq((base, None))
        if name in ("max", "amax") and last_axis(axis):
            top = _L.plus(num(base.offset + base.added)) if isinstance(base, Counted) else None
            if isinstance(base, Arange) and base.stop is not None:
                top = base.stop.plus(num(1), -1)
            return top if name == "amax" or top is None else Seq((top, None))  # (values, indices)
        if name in ("sum", "count_nonzero") and last_axis(axis) and isinstance(base, Grid) and base.what == "mask":
            return _L.plus(base.cols.plus(_P, -1))
        if name == "cumsum" and last_axis(axis) and isinstance(base, Grid) and base.what == "mask":
            return Counted(0, base.cols.plus(_P, -1).const)
        if name in ("eq", "logical_not"):
            zero = name == "logical_not" or (args and isinstance(args[0], ast.Constant) and args[0].value == 0)
            return Grid("pad", base.cols) if zero and isinstance(base, Grid) and base.what == "mask" else None
        if name == "masked_fill" and isinstance(base, Counted) and args:
            where = self.eval(args[0])
            return replace(base) if isinstance(where, Grid) and where.what == "pad" else None
        if name in ("clamp", "clamp_min", "clip", "relu", "maximum"):
            return self._clamped(name, base, args, given)
        if name == "fill" and isinstance(base, Num) and args:
            return tensor(self.eval(args[0]))
        if name in ("add", "sub") and len(args) == 1 and not given:
            return self._arith(ast.Add() if name == "add" else ast.Sub(), base, self.eval(args[0]))
        return None

    def _clamped(self, name: str, base: Value, args: list[ast.expr], given: dict[str, ast.expr]) -> Value:
        """No less than 0: what is counted in real positions stays."""
        low = given.get("min") or (args[0] if args else None)
        zero = name == "relu" or (isinstance(low, ast.Constant) and low.value == 0)
        if not zero or "max" in given or len(args) > 1:
            return None
        if isinstance(base, Counted):
            return replace(base) if base.offset >= -1 else None
        natural = base.natural if isinstance(base, Num) else isinstance(base, Arange) and base.start.natural
        return base if natural else None

    def _reshaped(self, name: str, base: Value, args: list[ast.expr]) -> Value:
        """The same numbers along the same last axis."""
        if isinstance(base, Num):
            return replace(base, tensor=False) if name in ("item", "tolist") else base
        last = ast.unparse(args[-1]) if args else ""
        wants = {"unsqueeze": "0", "squeeze": "0", "view": "-1", "reshape": "-1", "repeat": "1", "tile": "1"}
        fits = last == wants[name] if name in wants else name in ("expand", "expand_as", "broadcast_to", "tolist")
        flat = isinstance(base, Counted) and name in ("view", "reshape", "squeeze", "unsqueeze")
        return base if isinstance(base, (Arange, Counted)) and fits and not flat else None

    def _arange(self, e: ast.Call) -> Value:
        if len(e.args) > 2 or not e.args or any(k.arg == "step" for k in e.keywords):
            return None
        ends = [self.eval(a) for a in e.args]
        start = ends[0] if len(ends) == 2 else num()
        stop = ends[-1] if isinstance(ends[-1], Num) else None
        if not isinstance(start, Num):
            return None
        if stop is not None and stop.plus(start, -1).same(num(1)):
            return start  # one position
        return Arange(start, stop)

    def _joined(self, parts: Value, axis: ast.expr | None) -> Value:
        """`cat` along the last axis: a mask that grows, or tokens that do."""
        if not (isinstance(parts, Seq) and not parts.many and len(parts.items) == 2 and last_axis(axis)):
            return None
        first, second = parts.items
        if isinstance(first, Grid) and first.what == "mask":
            more = isinstance(second, Grid) and second.what == "ones"
            return Grid("mask", first.cols.plus(num(1))) if more else None
        if isinstance(first, Grid) and isinstance(second, Grid) and first.what != "pad":
            return Grid("other", first.cols.plus(second.cols))
        return None


def _cut(base: Arange, low: Num, high: Num | None) -> Value:
    if low.terms or low.const < 0 or high is None or (not high.terms and high.const < 0):
        return None
    return Arange(base.start.plus(low), base.start.plus(high))
