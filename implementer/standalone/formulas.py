"""Formulas of what a runner's names hold: positions, lengths, masks and tokens of a prompt batch."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TypeGuard

from kvskill.analyzer.runner.files import own_name

__all__ = [
    *("Arange", "Counted", "Grid", "Num", "Seq", "Tok", "Value"),
    *("alike", "is_mask", "key", "last_axis", "minus_one", "num", "root", "shape_of", "tensor", "uniform", "whole"),
]


@dataclass(frozen=True, eq=False)
class Num:
    """A whole number, or a tensor of equal numbers (by row, where L is in it): sum of symbols and a constant."""

    terms: tuple[tuple[str, int], ...] = ()
    const: int = 0
    tensor: bool = False  # `+=` then changes what shares it

    def same(self, other: object) -> bool:
        return isinstance(other, Num) and (self.terms, self.const) == (other.terms, other.const)

    @property
    def natural(self) -> bool:
        """Surely not negative."""
        return self.const >= 0 and all(n >= 0 for _, n in self.terms)

    @property
    def by_row(self) -> bool:
        return any(s in ("L", "K") for s, _ in self.terms)

    def plus(self, other: Num, sign: int = 1) -> Num:
        terms = dict(self.terms)
        for s, n in other.terms:
            terms[s] = terms.get(s, 0) + sign * n
        total = self.const + sign * other.const
        return Num(tuple(sorted((s, n) for s, n in terms.items() if n)), total, self.tensor or other.tensor)


def num(const: int = 0, **terms: int) -> Num:
    """`num(-1, P=1)` is P - 1."""
    return Num(tuple(sorted(terms.items())), const)


@dataclass(frozen=True, eq=False)
class Arange:
    """start, start + 1, .. along the last axis; `stop` is None where it is not known."""

    start: Num
    stop: Num | None


@dataclass(frozen=True, eq=False)
class Counted:
    """The running count of a padding mask plus `offset`; with `added` columns of ones behind the prompt."""

    offset: int
    added: int = 0


@dataclass(frozen=True, eq=False)
class Grid:
    """[B, columns] of one kind.

    "ids" (the prompts' own tokens), "mask" (their padding mask), "pad" (where it is 0), "ones", "other" (any tokens).
    """

    what: str
    cols: Num


@dataclass(frozen=True, eq=False)
class Tok:
    """The result of a tokenizer, or (`plain`) a dict of its fields."""

    ids: Grid
    mask: Grid
    plain: bool = False


@dataclass(frozen=True, eq=False)
class Seq:
    """A Python list or tuple of known items; `many`: the first one repeated."""

    items: tuple[Value, ...]
    many: bool = False


Value = Num | Arange | Counted | Grid | Tok | Seq | bool | str | None


def alike(a: Value, b: Value) -> bool:
    """Are two values known to be the same?"""
    if a is b:
        return True
    if isinstance(a, Num):
        return a.same(b)
    if isinstance(a, Arange) and isinstance(b, Arange):
        return a.start.same(b.start) and (a.stop is b.stop or (a.stop is not None and a.stop.same(b.stop)))
    if isinstance(a, Grid) and isinstance(b, Grid):
        return a.what == b.what != "other" and a.cols.same(b.cols)
    if isinstance(a, Counted) and isinstance(b, Counted):
        return (a.offset, a.added) == (b.offset, b.added)
    if isinstance(a, Tok) and isinstance(b, Tok):
        return a.plain == b.plain
    return isinstance(a, (bool, str)) and a == b


def is_mask(v: Value) -> TypeGuard[Grid]:
    """Is it the padding mask of the prompts?"""
    return isinstance(v, Grid) and v.what == "mask"


def shape_of(base: Value) -> Value:
    if isinstance(base, Grid):
        return Seq((num(B=1), base.cols))
    if isinstance(base, Counted):
        return Seq((num(B=1), num(P=1).plus(num(base.added))))
    return None


def uniform(held: Value) -> Value:
    """The number that every item of a nested list is; another value as it is."""
    while isinstance(held, Seq):
        if not held.items or (not held.many and len(held.items) > 1):
            return None
        held = held.items[0]
    return held


def whole(p: ast.expr) -> bool:
    """`:`, `None` and `...` as an index."""
    if isinstance(p, ast.Slice):
        return p.lower is None and p.upper is None and p.step is None
    return isinstance(p, ast.Constant) and p.value in (None, ...)


def minus_one(p: ast.expr) -> bool:
    if isinstance(p, ast.Slice):
        return p.upper is None and p.step is None and p.lower is not None and minus_one(p.lower)
    return ast.unparse(p) == "-1"


def last_axis(axis: ast.expr | None) -> bool:
    return axis is not None and ast.unparse(axis) in ("-1", "1")


def tensor(v: Value) -> Value:
    return replace(v, tensor=True) if isinstance(v, Num) else v


def key(e: ast.AST | None) -> str | None:
    """How a plain name and `self.name` are kept."""
    name = own_name(e) if e is not None else None
    return name if isinstance(e, ast.Name) or name is None else f"self.{name}"


def root(e: ast.expr) -> str | None:
    """The name that a part of is written."""
    while key(e) is None:
        if isinstance(e, (ast.Subscript, ast.Attribute)):
            e = e.value
        elif isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute):
            e = e.func.value
        else:
            return None
    return key(e)
