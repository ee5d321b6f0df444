"""Values that nobody reads any more, further along the calls: elements of returned tuples, entries of a dict of
arguments."""

from __future__ import annotations

import ast
from collections.abc import Callable

from kvskill.analyzer.modeling.values import Frame, Func
from kvskill.implementer.framework.calls import drop_parameter
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import names_read, replace_expr, statements

__all__ = ["dead_entries", "dead_returns"]

Reads = Callable[[Func, int], set[str]]  # names that a function reads after a line


def dead_returns(ctx: Context, reads: Reads) -> bool:
    """`a, b = f(x)` with b read by no caller: f returns None there, and what it computed b from is free."""
    changed = False
    calls: dict[int, list[Frame]] = {}
    for frame in ctx.frames:
        if isinstance(frame.func, ast.FunctionDef) and frame.parent is not None:
            calls.setdefault(id(frame.func), []).append(frame)
    for frames in calls.values():
        dead: set[int] | None = None
        for frame in frames:
            here = _unread(ctx, frame, reads)
            dead = here if dead is None else dead & here
        if dead:
            changed |= _return_none(ctx, frames[0], dead)
    return changed


def _unread(ctx: Context, frame: Frame, reads: Reads) -> set[int]:
    """Positions of the call's result that its caller binds to freed names and does not read."""
    parent, stmt, call = frame.parent, frame.call_stmt, frame.call
    if parent is None or not isinstance(parent.func, ast.FunctionDef) or not isinstance(stmt, ast.Assign):
        return set()
    if stmt.value is not call or len(stmt.targets) != 1 or not isinstance(stmt.targets[0], ast.Tuple):
        return set()
    func = Func(parent.func, parent.file, parent.owner)
    freed = ctx.freed.get(id(parent.func), set())
    if any(stmt in list(statements([s])) for s in statements(parent.func.body) if isinstance(s, (ast.For, ast.While))):
        return set()
    left = reads(func, stmt.lineno)
    return {
        i
        for i, target in enumerate(stmt.targets[0].elts)
        if isinstance(target, ast.Name) and target.id in freed and target.id not in left
    }


def _return_none(ctx: Context, frame: Frame, dead: set[int]) -> bool:
    func = frame.func
    assert isinstance(func, ast.FunctionDef)
    returns = [s for s in statements(func.body) if isinstance(s, ast.Return)]
    wide = max(dead) + 1
    if not returns or not all(isinstance(r.value, ast.Tuple) and len(r.value.elts) >= wide for r in returns):
        return False
    found: list[ast.Name] = []
    for stmt in returns:
        assert isinstance(stmt.value, ast.Tuple)
        items = [stmt.value.elts[i] for i in dead]
        found.extend(e for e in items if isinstance(e, ast.Name) and id(e) not in ctx.dropped_args)
    if found:
        ctx.narrowed[id(func)] = func
    for name in found:
        ctx.dropped_args.add(id(name))
        replace_expr(ctx.edit_set(frame.file), name, "None", "no caller reads it any more")
        ctx.functions.setdefault(id(func), Func(func, frame.file, frame.owner))
        ctx.freed.setdefault(id(func), set()).add(name.id)
    return bool(found)


def dead_entries(ctx: Context, reads: Reads, dropped: set[tuple[int, str]]) -> bool:
    """`fn(**kwargs)` with a dict written beside it: entries that none of the functions reads go."""
    changed = False
    for made in ctx.frames_by_call.values():
        frames = [f for f in made if isinstance(f.func, ast.FunctionDef)]
        if not frames:
            continue
        entries = _dict_argument(frames[0])
        if entries is None:
            continue
        owner, items = entries
        funcs = {id(f.func): f for f in frames}
        for name, (key, value) in items.items():
            if id(key) in ctx.dropped_args or not any(name in ctx.freed.get(key_, set()) for key_ in funcs):
                continue
            reached = [Func(f.func, f.file, f.owner) for f in funcs.values() if isinstance(f.func, ast.FunctionDef)]
            if any(name in reads(f, 0) or not _has(f.node, name) for f in reached):
                continue
            for f in reached:
                assert isinstance(f.node, ast.FunctionDef)
                drop_parameter(ctx, f.file, f.node, name)
                dropped.add((id(f.node), name))
            parent = frames[0].parent
            assert parent is not None and isinstance(parent.func, ast.FunctionDef)
            ctx.dropped_args.update((id(key), id(value)))
            ctx.cuts.setdefault(id(owner), (parent.file, owner, {}))[2][id(key)] = f"{name} is not needed any more"
            ctx.functions.setdefault(id(parent.func), Func(parent.func, parent.file, parent.owner))
            ctx.freed.setdefault(id(parent.func), set()).update(names_read([value]))
            changed = True
    return changed


def _has(func: ast.AST | None, name: str) -> bool:
    return isinstance(func, ast.FunctionDef) and any(a.arg == name for a in [*func.args.args, *func.args.kwonlyargs])


def _dict_argument(frame: Frame) -> tuple[ast.Dict, dict[str, tuple[ast.expr, ast.expr]]] | None:
    """The dict that a call takes all its arguments from: bound once in the caller, to names and constants, and read
    nowhere else."""
    call, parent = frame.call, frame.parent
    if not isinstance(call, ast.Call) or parent is None or not isinstance(parent.func, ast.FunctionDef) or call.args:
        return None
    stars = [k.value for k in call.keywords if k.arg is None]
    if len(stars) != 1 or not isinstance(stars[0], ast.Name):
        return None
    name = stars[0].id
    uses = [n for n in ast.walk(parent.func) if isinstance(n, ast.Name) and n.id == name]
    made = [
        s.value
        for s in statements(parent.func.body)
        if isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name)
        if s.targets[0].id == name
    ]
    if len(uses) != 2 or len(made) != 1 or not isinstance(made[0], ast.Dict):
        return None
    items: dict[str, tuple[ast.expr, ast.expr]] = {}
    for key, value in zip(made[0].keys, made[0].values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            return None
        if isinstance(value, (ast.Name, ast.Constant)):
            items[key.value] = (key, value)
    return made[0], items
