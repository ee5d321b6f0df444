"""Fields of a step's record (a dataclass handed to all layers) that nothing reads any more: None is given for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kvskill.analyzer.modeling.values import ClassVal, External, Frame, Func, Instance
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import names_read, replace_expr, whole_removal

__all__ = ["drop_fields"]


def drop_fields(ctx: Context) -> bool:
    """Give None for fields without a reader, so that what was computed for them becomes dead; True if any was."""
    made = list(_constructions(ctx))
    if not made or _taken_apart(ctx):
        return False
    read = _fields_read(ctx)
    changed = False
    for frame, node, cls in made:
        func = frame.func
        assert isinstance(func, ast.FunctionDef)
        for name, arg in _given(node, cls):
            plain = isinstance(arg, ast.Constant) or id(arg) in ctx.dropped_args
            if name in read or plain or not _without_effect(arg):
                continue
            replace_expr(ctx.edit_set(frame.file), arg, "None", f"nothing reads `{name}` any more")
            ctx.dropped_args.add(id(arg))
            ctx.functions.setdefault(id(func), Func(func, frame.file, frame.owner))
            ctx.freed.setdefault(id(func), set()).update(names_read([arg]))
            changed = True
    return changed


def _constructions(ctx: Context) -> Iterator[tuple[Frame, ast.Call, ClassVal]]:
    """Calls that make an object of a dataclass of the files."""
    seen: set[int] = set()
    for frame in ctx.frames:
        if not isinstance(frame.func, ast.FunctionDef):
            continue
        for node in ast.walk(frame.func):
            value = frame.values.get(id(node))
            if not isinstance(node, ast.Call) or not isinstance(value, Instance) or id(node) in seen:
                continue
            if frame.values.get(id(node.func)) is value.cls and _is_record(ctx, value.cls):
                seen.add(id(node))
                yield frame, node, value.cls


def _is_record(ctx: Context, cls: ClassVal) -> bool:
    names = ctx.facts.program.modules[cls.file.shown]
    for decorator in cls.node.decorator_list:
        text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        head, dot, rest = text.partition(".")
        found = names.get(head)
        if isinstance(found, External) and f"{found.name}{dot}{rest}" == "dataclasses.dataclass":
            return cls.method("__post_init__") is None
    return False


def _given(node: ast.Call, cls: ClassVal) -> Iterator[tuple[str, ast.expr]]:
    fields = [
        item.target.id
        for base in reversed(cls.mro())
        for item in base.node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    if any(isinstance(a, ast.Starred) for a in node.args):
        return
    yield from zip(fields, node.args, strict=False)
    yield from ((k.arg, k.value) for k in node.keywords if k.arg is not None)


def _taken_apart(ctx: Context) -> bool:
    """Does any code read records field by field without naming the fields?"""
    for file in ctx.facts.program.files.values():
        for node in ast.walk(file.tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("asdict", "astuple", "__dict__", "vars"):
                return True
    return False


def _fields_read(ctx: Context) -> set[str]:
    """Names of attributes that code which stays may read."""
    gone: set[int] = set(ctx.dropped_args)
    for key, func in ctx.functions.items():
        assert isinstance(func.node, ast.FunctionDef)
        for stmt in whole_removal(func.node.body, ctx.removed.get(key, set())):
            gone.update(id(n) for n in ast.walk(stmt))
    for stmts in ctx.rewritten.values():
        gone.update(id(n) for s in stmts for n in ast.walk(s))
    gone.update(id(n) for f in _dead_functions(ctx, gone) for n in ast.walk(f))
    out: set[str] = set()

    def visit(node: ast.AST) -> None:
        if id(node) in gone:
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            out.add(node.attr)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            out.add(node.value)  # getattr
        for child in ast.iter_child_nodes(node):
            visit(child)

    for file in ctx.facts.program.files.values():
        visit(file.tree)
    return out


def _dead_functions(ctx: Context, gone: set[int]) -> set[ast.FunctionDef]:
    """Functions that were only called from code that goes."""
    ran: set[ast.FunctionDef] = set()
    alive: set[ast.FunctionDef] = set()
    for frame in ctx.frames:
        if isinstance(frame.func, ast.FunctionDef):
            ran.add(frame.func)
            above = frame.chain()
            if not any(f.call_stmt is not None and id(f.call_stmt) in gone for f in above):
                alive.add(frame.func)
    return ran - alive


def _without_effect(node: ast.AST) -> bool:
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    names = [f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls]
    return not any(n.endswith("_") and not n.endswith("__") for n in names)
