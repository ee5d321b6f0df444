"""Keyword arguments that only a `**kwargs` takes, and that nothing at the end of it reads any more."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Func
from kvskill.implementer.framework.calls import drop_argument
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import names_read

__all__ = ["drop_starred"]


def drop_starred(ctx: Context, names: set[str]) -> bool:
    """Drop arguments of these names where they end in a `**kwargs` that carries them to no reader; True if any went.

    `names` are those of parameters that were dropped: an argument that was dead before is not ours to remove.
    """
    changed = False
    for frame in ctx.frames:
        call, parent = frame.call, frame.parent
        if not isinstance(call, ast.Call) or parent is None or not isinstance(parent.func, ast.FunctionDef):
            continue
        for keyword in call.keywords:
            if keyword.arg not in names or id(keyword) in ctx.dropped_args:
                continue
            if not all(_unread(ctx, target, keyword.arg, set()) for target in _targets(ctx, call)):
                continue
            gone = drop_argument(ctx, frame, keyword.arg)
            if gone:
                owner = Func(parent.func, parent.file, parent.owner)
                ctx.functions.setdefault(id(parent.func), owner)
                ctx.freed.setdefault(id(parent.func), set()).update(names_read(gone))
                changed = True
    return changed


def _targets(ctx: Context, call: ast.Call) -> list[ast.FunctionDef | None]:
    """The functions that a call reached; [None] for a call that was not followed."""
    found: list[ast.FunctionDef | None] = []
    for frame in ctx.frames_by_call.get(id(call), ()):
        func = frame.func if isinstance(frame.func, ast.FunctionDef) else None
        if func not in found:
            found.append(func)
    return found or [None]


def _unread(ctx: Context, func: ast.FunctionDef | None, name: str, seen: set[int]) -> bool:
    """Does `name`, given to this function, end in its `**kwargs`, and is it read nowhere behind that?"""
    if func is None:
        return False
    if id(func) in seen:
        return True
    seen.add(id(func))
    spec = func.args
    params = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    if spec.kwarg is None or any(p.arg == name and id(p) not in ctx.dropped_args for p in params):
        return False
    stars = spec.kwarg.arg
    passed_on = {
        id(k.value): node
        for node in ast.walk(func)
        if isinstance(node, ast.Call)
        for k in node.keywords
        if k.arg is None and isinstance(k.value, ast.Name) and k.value.id == stars
    }
    for node in ast.walk(func):
        if isinstance(node, ast.Name) and node.id == stars:
            call = passed_on.get(id(node))
            if call is None:  # kwargs.get(name), a loop over it, a new binding: somebody may read it
                return False
            for target in _targets(ctx, call):
                takes = target is not None and target.args.kwarg is None
                if not takes and not _unread(ctx, target, name, seen):
                    return False
    return True
