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
    "write_cuts",
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
        lead = _lead(file, left, end)
        edits.add(end, end, f"{lead}{name}={value}", f"pass {name} on")


def _lead(file: SourceFile, left: list[ast.AST], end: int) -> str:
    """What separates a new item from the last one: a line of its own where the last one has one."""
    if not left:
        return ""
    last = max(left, key=lambda n: file.byte_range(n)[0] if file.byte_range(n)[1] <= end else -1)
    start = file.byte_range(last)[0]
    line = max(s for s in file.line_starts if s <= start)
    head = file.raw[line:start]
    if not head.strip():
        return "," + "\n" + head.decode()
    words = head.strip()
    if words.endswith((b"=", b"**", b"*", b":")) and b"(" not in words and b"," not in words:  # name=value on its line
        return "," + "\n" + head[: len(head) - len(head.lstrip())].decode()
    return ", "


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
    """Ask for an item of a comma-separated list to go."""
    del default
    ctx.cuts.setdefault(id(owner), (file, owner, {}))[2][id(node)] = why
    return True


def write_cuts(ctx: Context) -> None:
    """Cut the items that were asked for, run by run, each run with the commas that belong to it."""
    for file, owner, gone in ctx.cuts.values():
        items = _items(file, owner)
        edits = ctx.edit_set(file)
        i = 0
        while i < len(items):
            if items[i][0] not in gone:
                i += 1
                continue
            j = i
            while j + 1 < len(items) and items[j + 1][0] in gone:
                j += 1
            why = gone[items[i][0]]
            if j + 1 < len(items):
                edits.add(items[i][1], items[j + 1][1], "", why)
            elif i > 0:
                edits.add(items[i - 1][2], items[j][2], "", why)
            else:
                edits.add(items[i][1], items[j][2], "", why)
            i = j + 1


def _items(file: SourceFile, owner: ast.AST) -> list[tuple[int, int, int]]:
    """(id, start, end) of the items of a call or of a parameter list, in order of place."""
    out: list[tuple[int, int, int]] = []
    if isinstance(owner, ast.Call):
        for arg in owner.args:
            out.append((id(arg), *file.byte_range(arg)))
        for keyword in owner.keywords:
            out.append((id(keyword), *file.byte_range(keyword)))
    elif isinstance(owner, ast.Dict):
        for key, value in zip(owner.keys, owner.values, strict=True):
            first = key if key is not None else value
            out.append((id(first), file.byte_range(first)[0], file.byte_range(value)[1]))
    elif isinstance(owner, ast.FunctionDef):
        spec = owner.args
        positional = [*spec.posonlyargs, *spec.args]
        defaults: dict[int, ast.expr | None] = dict(
            zip(map(id, positional[len(positional) - len(spec.defaults) :]), spec.defaults, strict=True)
        )
        defaults |= dict(zip(map(id, spec.kwonlyargs), spec.kw_defaults, strict=True))
        for param in [*positional, *spec.kwonlyargs]:
            start, end = file.byte_range(param)
            default = defaults.get(id(param))
            out.append((id(param), start, file.byte_range(default)[1] if default is not None else end))
        for star, mark in ((spec.vararg, 1), (spec.kwarg, 2)):
            if star is not None:
                start, end = file.byte_range(star)
                out.append((id(star), start - mark, end))
    return sorted(out, key=lambda x: x[1])
