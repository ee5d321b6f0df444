"""Caches that the model held for its attention: what is left of them after the seam was replaced."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Func
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import statements, whole_removal
from kvskill.source import SourceFile

__all__ = ["drop_held_caches"]


def drop_held_caches(ctx: Context) -> None:
    """Guards that ask whether the caches are there go, with their first None; any other use left is refused."""
    holders = [h for facts in ctx.facts.attentions for h in facts.caches.holders]
    if not holders or ctx.facts.entry is None:
        return
    dropped = ctx.facts.entry.method("init_cache")
    skip = {id(n) for n in ast.walk(dropped[0])} if dropped is not None else set()
    for cls in ctx.facts.program.classes():
        names = {attr for holder, attr in holders if cls in holder.cls.mro()}
        for func in cls.node.body:
            if names and isinstance(func, ast.FunctionDef) and id(func) not in skip:
                _settle(ctx, Func(func, cls.file, cls), names)


def _settle(ctx: Context, func: Func, names: set[str]) -> None:
    node = func.node
    assert isinstance(node, ast.FunctionDef)
    gone = {id(n) for s in whole_removal(node.body, ctx.removed.get(id(node), set())) for n in ast.walk(s)}
    gone |= {id(n) for d in ast.walk(node) if id(d) in ctx.dropped_args for n in ast.walk(d)}
    for stmt in list(statements(node.body)):
        if id(stmt) in gone:
            continue
        made = _sets(stmt, names) and (node.name == "__init__" or _empty(stmt))
        if made or _is_guard(stmt, names):
            ctx.mark_removed(func, {stmt})
            gone |= {id(n) for n in ast.walk(stmt)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in names and id(part) not in gone and _on_self(node, part):
            _refuse(ctx, func.file, part)


def _on_self(func: ast.FunctionDef, node: ast.Attribute) -> bool:
    me = func.args.args[0].arg if func.args.args else "self"
    return isinstance(node.value, ast.Name) and node.value.id == me


def _is_guard(stmt: ast.stmt, names: set[str]) -> bool:
    """`if self.caches is None: raise ...`"""
    return (
        isinstance(stmt, ast.If)
        and not stmt.orelse
        and all(isinstance(s, ast.Raise) for s in stmt.body)
        and any(isinstance(n, ast.Attribute) and n.attr in names for n in ast.walk(stmt.test))
    )


def _sets(stmt: ast.stmt, names: set[str]) -> bool:
    """`self.caches = ...`, and nothing else."""
    target = stmt.targets[0] if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1 else None
    if isinstance(stmt, ast.AnnAssign):
        target = stmt.target
    return isinstance(target, ast.Attribute) and target.attr in names


def _empty(stmt: ast.stmt) -> bool:
    value = getattr(stmt, "value", None)
    none = isinstance(value, ast.Constant) and value.value is None
    return none or (isinstance(value, (ast.List, ast.Tuple)) and not value.elts)


def _refuse(ctx: Context, file: SourceFile, node: ast.AST) -> None:
    name = getattr(node, "attr", "?")
    ctx.refuse(
        file,
        node,
        "KV276",
        f"`{name}` is still used here, outside the code that was replaced.",
        "Remove this use of the Legacy cache.",
    )
