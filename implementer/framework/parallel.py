"""Branches that run only with more than one card, and that count requests or tokens.

The single-card path is proved; these are not. They are left as they are, but raise, and are reported as optional
tasks: under the configuration that uses them, packed tokens need padding that only a person can place.
"""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Const, Scalar, Tensor, Tup, Value
from kvskill.analyzer.modeling.walk import RUNTIME, Test
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import insert_before, statements, whole_removal

__all__ = ["guard_parallel_branches"]


def guard_parallel_branches(ctx: Context, functions: set[int]) -> None:
    """Guard such branches of the given functions (ids of nodes)."""
    run = ctx.facts.prefill
    assert run is not None
    done: set[int] = set()
    for test in run.walk.tests:
        func = test.frame.func
        owner = test.owner
        if not isinstance(owner, ast.If) or id(owner) in done or not isinstance(func, ast.FunctionDef):
            continue
        if id(func) not in functions or test.value != Const(False) or not _off(test):
            continue
        if owner in whole_removal(func.body, ctx.removed.get(id(func), set())):
            continue
        done.add(id(owner))
        _guard(ctx, test, owner.body, func)


def _guard(ctx: Context, test: Test, body: list[ast.stmt], func: ast.FunctionDef) -> None:
    """Let a branch raise where it counts; of branches inside it, only those that do."""
    if not body:
        return
    first = body[0]
    if len(body) == 1 and isinstance(first, ast.If):
        _guard(ctx, test, first.body, func)
        _guard(ctx, test, first.orelse, func)
        return
    if not _counts(test, body):
        return
    file = test.frame.file
    text = 'raise NotImplementedError("this branch shards requests by batch row; packed tokens need padding here")\n'
    insert_before(ctx.edit_set(file), first, text, "multi-card branch", ctx.unit(func, file))
    if _depends(test, "parallel_config"):
        ctx.optional(
            file,
            first,
            "KV220",
            "This multi-card branch counts requests by batch row and was not converted; it raises now.",
            "Pad the packed tokens to a multiple of the group size here, then remove the raise.",
        )
    else:
        ctx.optional(
            file,
            first,
            "KV221",
            "These settings do not take this branch, which counts requests by batch row; it raises now.",
            "Convert it like the path that runs, then remove the raise, if you use this mode.",
        )


def _off(test: Test) -> bool:
    return _depends(test, "parallel_config") or _depends(test, "custom_params")


def _depends(test: Test, setting: str) -> bool:
    """Does the condition depend on a run setting?"""
    for node in ast.walk(test.node):
        if isinstance(node, ast.expr) and setting in _text(test.frame.values.get(id(node))):
            return True
    return False


def _text(value: Value | None) -> str:
    path = getattr(value, "path", None)
    if isinstance(path, str):
        return path
    if isinstance(value, Scalar):
        return f"{value.text} {value.dim}"
    if isinstance(value, Const):
        return value.origin
    return ""


def _counts(test: Test, body: list[ast.stmt]) -> bool:
    """Does the branch, which did not run, use sizes of the runtime axes?"""
    env = test.frame.env_before.get(id(test.owner), {})
    bound: set[str] = set()
    for stmt in statements(body):
        for node in ast.walk(stmt):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Store):
                    bound.add(node.id)
                elif node.id not in bound and _runtime(env.get(node.id)):
                    return True
            if isinstance(node, ast.Attribute) and node.attr in ("shape", "size"):
                base = env.get(node.value.id) if isinstance(node.value, ast.Name) else None
                if isinstance(base, Tensor) and base.stream:
                    return True
    return False


def _runtime(value: Value | None) -> bool:
    if isinstance(value, Scalar) and value.dim is not None:
        return bool(value.dim.atoms & RUNTIME)
    if isinstance(value, Tup):
        return any(_runtime(v) for v in value.items)
    return False
