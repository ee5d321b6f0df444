"""Where the paged step may stand in a loop, and who else reads the names that it binds anew.

The step replaces assignments. A read that stays must see what it saw before: in the same step, after the new
assignment. A read that would see another step's value, or the count by column where the step counts real tokens, is a
doubt.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from kvskill.analyzer.runner.files import leaf, own_name
from kvskill.implementer.standalone.flow import Flow
from kvskill.implementer.standalone.formulas import alike
from kvskill.implementer.standalone.proof import Doubt
from kvskill.implementer.textops import block_of, blocks_in, names_read, statements

__all__ = [
    *("Place", "assigns", "derived", "find_place"),
    *("is_log", "other_bindings", "other_reads", "out_of_order", "own_nodes"),
]

_LOGS = ("debug", "info", "warning", "print", "log")


@dataclass(frozen=True, eq=False)
class Place:
    """`at` is replaced (it is one of `old`), or the step stands before it; `old` are the replaced assignments."""

    at: ast.stmt
    old: tuple[ast.stmt, ...]


def assigns(body: Iterable[ast.stmt], name: str) -> list[ast.stmt]:
    """Statements that bind nothing but this name, or change it in place."""
    out: list[ast.stmt] = []
    for s in statements(body):
        if isinstance(s, ast.Assign) and len(s.targets) == 1:
            target: ast.expr | None = s.targets[0]
        elif isinstance(s, (ast.AugAssign, ast.AnnAssign)):
            target = s.target
        else:
            target = _changed(s.value) if isinstance(s, ast.Expr) else None
        while isinstance(target, ast.Subscript):  # `name[mask == 0] = 1`
            target = target.value
        if target is not None and own_name(target) == name:
            out.append(s)
    return out


def _changed(e: ast.expr) -> ast.expr | None:
    """What a call like `x.add_(1)` changes."""
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr.endswith("_"):
        return e.func.value
    return None


def find_place(
    func: ast.FunctionDef, call: ast.stmt, old: list[ast.stmt], names: set[str], after: Iterable[ast.stmt] = ()
) -> Place:
    """The first place in the block of the call that binds or reads one of the names, and comes after `after`."""
    block = block_of(func, call)
    end = block.index(call)
    start = max((i + 1 for i, s in enumerate(block[:end]) if any(_inside(s, a) for a in after)), default=0)
    mentions = (s for s in block[start:end] if any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(s)))
    return Place(next(mentions, call), tuple(old))


def _inside(outer: ast.stmt, stmt: ast.stmt) -> bool:
    return any(n is stmt for n in ast.walk(outer))


def out_of_order(func: ast.FunctionDef, place: Place, call: ast.stmt, names: set[str], flow: Flow) -> Doubt | None:
    """A read between the step and the call that saw another value than the call gets: one of an earlier step, or one
    that was changed afterwards.
    """
    gone = {id(n) for s in place.old for n in ast.walk(s)}
    for s in _between(func, place, call)[:-1]:
        for name in {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and n.id in names and id(n) not in gone}:
            read = ast.Name(name, ast.Load())
            pairs = zip(flow.values(s, read), flow.values(call, read), strict=False)
            if not all(alike(a, b) for a, b in pairs):
                return Doubt(
                    s,
                    f"`{name}` is read here with another value than the model gets in this step",
                    "Bind lengths and positions of a step first, and read them after that.",
                )
    return None


def other_bindings(
    func: ast.FunctionDef, names: set[str], old: Iterable[ast.stmt], where: Callable[[ast.AST], bool]
) -> Doubt | None:
    """The first binding of one of the names that is no plain assignment of it alone."""
    gone = {id(n) for s in old for n in ast.walk(s)}
    for n in ast.walk(func):
        stored = isinstance(n, ast.Name) and n.id in names and not isinstance(n.ctx, ast.Load)
        if isinstance(n, ast.Name) and stored and id(n) not in gone and where(n):
            return Doubt(n, f"`{n.id}` is bound here together with others", "Bind it by an assignment of its own.")
    return None


def derived(func: ast.FunctionDef, place: Place, call: ast.stmt, names: set[str]) -> set[str]:
    """Names that assignments between the step and the model call make of the step's values."""
    watched = set(names)
    for _ in range(8):
        for s in _between(func, place, call):
            if isinstance(s, ast.Assign) and s is not call and s not in place.old and names_read([s.value]) & watched:
                watched |= {e.id for t in s.targets for e in ast.walk(t) if isinstance(e, ast.Name)}
    return watched - names


def _between(func: ast.FunctionDef, place: Place, call: ast.stmt) -> list[ast.stmt]:
    block = block_of(func, call)
    return block[block.index(place.at) : block.index(call) + 1]


def other_reads(
    func: ast.FunctionDef,
    place: Place,
    call: ast.stmt,
    names: set[str],
    where: Callable[[ast.AST], bool],
    passes: Set[str] = frozenset(),
) -> Doubt | None:
    """The first read of one of the names, of those `where` looks at, that the step does not keep right.

    Right are: assignments between the step and the model call, the call itself, log lines after the step, and
    assignments of names in `passes`, which the step binds anew.
    """
    gone = {id(n) for s in place.old for n in ast.walk(s)}
    fine = {id(n) for s in _between(func, place, call) if s is call or _only_names(s) for n in ast.walk(s)}
    for stmt in statements(func.body):
        for n in own_nodes(stmt):
            name = own_name(n) if isinstance(n, (ast.Name, ast.Attribute)) else None
            if name not in names or not isinstance(getattr(n, "ctx", None), ast.Load) or not where(n):
                continue
            log = isinstance(stmt, ast.Expr) and is_log(stmt.value) and stmt.lineno > place.at.lineno
            same = isinstance(stmt, ast.Assign) and all(own_name(t) in passes for t in stmt.targets)
            if id(n) in gone or id(n) in fine or log or same:
                continue
            return Doubt(
                n,
                f"`{name}` is read here too; after the conversion it holds each row's own count for the step",
                "Count steps and columns under a name of their own for this, and leave this one to the model.",
            )
    return None


def _only_names(s: ast.stmt) -> bool:
    """An assignment of plain names: what it makes goes nowhere by itself."""
    targets = s.targets if isinstance(s, ast.Assign) else []
    parts = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return bool(parts) and all(isinstance(e, ast.Name) for e in parts)


def is_log(e: ast.expr) -> bool:
    """A line for a log: nothing else comes of what it reads."""
    return isinstance(e, ast.Call) and leaf(e.func) in _LOGS


def own_nodes(s: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without the statements in it."""
    inner = {id(b) for block in blocks_in(s) for b in block}
    todo: list[ast.AST] = [s]
    while todo:
        n = todo.pop()
        yield n
        todo += [c for c in ast.iter_child_nodes(n) if id(c) not in inner]
