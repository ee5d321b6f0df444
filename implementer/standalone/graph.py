"""Graph inputs that the runner marks as static: the step's metadata is one of them now."""

from __future__ import annotations

import ast

from kvskill.analyzer.runner.files import functions, leaf
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import insert_after, statements
from kvskill.source import SourceFile

__all__ = ["mark_step", "marks_static"]

_MARKS = ("mark_static", "mark_inputs")


def marks_static(ctx: Context) -> bool:
    """Does any file of the folder mark tensors as static for a graph?"""
    trees = [f.tree for f in ctx.facts.program.files.values()]
    return any(isinstance(n, ast.Call) and leaf(n.func) in _MARKS for tree in trees for n in ast.walk(tree))


def mark_step(ctx: Context) -> None:
    """After a statement that marks a dict of inputs, which the same function hands to the model by `**`, mark the
    step in it. (A loop that builds the step itself marks it where it is built.)
    """
    for file in ctx.facts.program.files.values():
        for func in functions(file):
            given = _starred(func.node)
            for stmt in statements(func.node.body):
                name = _marked(stmt)
                if name is not None and name in given:
                    _insert(ctx, file, func.node, stmt, name)


def _starred(func: ast.FunctionDef) -> set[str]:
    """Names that the function passes to a call as `**name`."""
    calls = [n for n in ast.walk(func) if isinstance(n, ast.Call)]
    return {k.value.id for c in calls for k in c.keywords if k.arg is None and isinstance(k.value, ast.Name)}


def _marked(stmt: ast.stmt) -> str | None:
    call = stmt.value if isinstance(stmt, ast.Expr) else None
    if not isinstance(call, ast.Call) or leaf(call.func) not in _MARKS or not call.args:
        return None
    return call.args[0].id if isinstance(call.args[0], ast.Name) else None


def _insert(ctx: Context, file: SourceFile, func: ast.FunctionDef, stmt: ast.stmt, name: str) -> None:
    text = f'{name}["forward_metadata"].mark_static()\n'
    insert_after(ctx.edit_set(file), stmt, text, "the step is a graph input", ctx.unit(func, file))
