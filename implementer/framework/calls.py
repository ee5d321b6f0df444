"""Parameters and call sites: adding an argument along a chain of calls, dropping one that nobody reads."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.values import Frame
from kvskill.implementer.framework.context import Context
from kvskill.source import SourceFile

__all__ = [
    "add_argument",
    "add_parameter",
    "drop_argument",
    "drop_parameter",
    "parameter_names",
    "write_additions",
]


def parameter_names(func: ast.FunctionDef) -> list[str]:
    return [a.arg for a in [*func.args.posonlyargs, *func.args.args, *func.args.kwonlyargs]]


def add_parameter(ctx: Context, file: SourceFile, func: ast.FunctionDef, name: str) -> None:
    """Ask for `name=None` as the last named parameter."""
    item: tuple[SourceFile, ast.Call | ast.FunctionDef, str, str] = (file, func, name, "None")
    if item not in ctx.added:
        ctx.added.append(item)


def add_argument(ctx: Context, file: SourceFile, call: ast.Call, name: str, value: str) -> None:
    """Ask for `name=value` in a call."""
    item: tuple[SourceFile, ast.Call | ast.FunctionDef, str, str] = (file, call, name, value)
    if item not in ctx.added:
        ctx.added.append(item)


def write_additions(ctx: Context) -> None:
    """Write what was asked for, after the last argument or parameter that stays."""
    for file, node, name, value in ctx.added:
        edits = ctx.edit_set(file)
        if isinstance(node, ast.Call):
            left: list[ast.AST] = [a for a in node.args if id(a) not in ctx.dropped_args]
            left += [k.value for k in node.keywords if id(k) not in ctx.dropped_args]
            end = max((file.byte_range(p)[1] for p in left), default=file.byte_range(node.func)[1] + 1)
        else:
            spec = node.args
            params = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
            positional = [*spec.posonlyargs, *spec.args]
            defaults: dict[int, ast.expr | None] = dict(
                zip(map(id, positional[len(positional) - len(spec.defaults) :]), spec.defaults, strict=True)
            )
            defaults |= dict(zip(map(id, spec.kwonlyargs), spec.kw_defaults, strict=True))
            left = [p for p in params if id(p) not in ctx.dropped_args]
            left += [d for p in params if id(p) not in ctx.dropped_args and (d := defaults.get(id(p))) is not None]
            if spec.vararg is not None:
                left.append(spec.vararg)
            end = max(file.byte_range(a)[1] for a in left)
        lead = ", " if left else ""
        edits.add(end, end, f"{lead}{name}={value}", f"pass {name} on")


def drop_parameter(ctx: Context, file: SourceFile, func: ast.FunctionDef, name: str) -> bool:
    """Remove a parameter with its default; False when it is not a plain named one."""
    spec = func.args
    if name in [a.arg for a in spec.posonlyargs]:
        return False
    args = spec.args
    index = next((i for i, a in enumerate(args) if a.arg == name), None)
    if index is not None:
        default_at = index - (len(args) - len(spec.defaults))
        default = spec.defaults[default_at] if default_at >= 0 else None
        ctx.dropped_args.add(id(args[index]))
        return _cut(ctx, file, func, args[index], default, f"{name} is not needed any more")
    for i, arg in enumerate(spec.kwonlyargs):
        if arg.arg == name and len(spec.kwonlyargs) > 1:
            ctx.dropped_args.add(id(arg))
            return _cut(ctx, file, func, arg, spec.kw_defaults[i], f"{name} is not needed any more")
    return False


def drop_argument(ctx: Context, frame: Frame, name: str) -> list[ast.expr] | None:
    """Remove the argument that the frame's call passes for a parameter.

    Returns what was removed ([] when the call passes none), or None when it cannot be told.
    """
    call, parent, func = frame.call, frame.parent, frame.func
    if not isinstance(call, ast.Call) or parent is None or not isinstance(func, ast.FunctionDef):
        return None
    file = parent.file
    for keyword in call.keywords:
        if keyword.arg == name:
            key = id(keyword)
            if key not in ctx.dropped_args:
                ctx.dropped_args.add(key)
                if not _cut(ctx, file, call, keyword, None, f"{name} is not needed any more"):
                    return None
            return [keyword.value]
    names = [a.arg for a in [*func.args.posonlyargs, *func.args.args]]
    offset = 1 if frame.owner is not None and frame.self_ is not None else 0
    position = names.index(name) - offset if name in names else -1
    if any(isinstance(a, ast.Starred) for a in call.args):
        return None
    if 0 <= position < len(call.args):
        arg = call.args[position]
        if id(arg) not in ctx.dropped_args:
            ctx.dropped_args.add(id(arg))
            if not _cut(ctx, file, call, arg, None, f"{name} is not needed any more"):
                return None
        return [arg]
    return []


def _cut(ctx: Context, file: SourceFile, owner: ast.AST, node: ast.AST, default: ast.expr | None, why: str) -> bool:
    """Cut an item of a comma-separated list together with one comma (and its line, when it stands alone)."""
    start, end = file.byte_range(node)
    if default is not None:
        end = file.byte_range(default)[1]
    raw = file.raw
    after = end
    while after < len(raw) and raw[after : after + 1] in (b" ", b"\t"):
        after += 1
    if raw[after : after + 1] == b",":
        end = after + 1
        line_start = raw.rfind(b"\n", 0, start) + 1
        rest = raw.find(b"\n", end)
        alone = not raw[line_start:start].strip() and rest >= 0 and not raw[end:rest].strip()
        if alone:
            ctx.edit_set(file).add(line_start, rest + 1, "", why)
            return True
        while raw[end : end + 1] in (b" ", b"\t"):
            end += 1
        ctx.edit_set(file).add(start, end, "", why)
        return True
    before = start
    while before > 0 and raw[before - 1 : before] in (b" ", b"\t", b"\n", b"\r"):
        before -= 1
    if raw[before - 1 : before] == b",":
        ctx.edit_set(file).add(before - 1, end, "", why)
        return True
    if raw[before - 1 : before] == b"(":
        ctx.edit_set(file).add(start, end, "", why)
        return True
    return False
