"""The prompt token that the model itself picks for its head: by row, from the step's metadata.

A model that picks by its positions, or takes the last column, is right for some paddings and lengths only (a filled-in
position of padding can be larger than a short prompt's own). The metadata knows each row's last real token.
"""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.dims import Dim, const
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import ancestors
from kvskill.analyzer.modeling.values import Frame, Func, Tensor, Value
from kvskill.analyzer.runner.files import leaf
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.threading import thread_metadata
from kvskill.implementer.standalone.attention import META
from kvskill.implementer.textops import insert_before, names_read, replace_expr, statements

__all__ = ["add_pick", "convert_pick"]

_PICKS = frozenset({"index_select", "gather", "getitem", "select", "narrow", "take_along_dim"})
# what an index may be made of: positions or lengths, and arithmetic on them
_INDEX = LAYOUT | {"max", "amax", "sum", "sub", "add", "to", "long", "int", "repeat", "select", "getitem", "cumsum"}


def convert_pick(ctx: Context) -> bool:
    """Replace the choice of one column per row; True when there was one and all of it was replaced or refused."""
    run = ctx.facts.prefill
    assert run is not None
    picks = [t for t in run.walk.tensors if t.stream and t.op in _PICKS and _columns(t) and not _in_attention(ctx, t)]
    nodes = {id(t.node): t for t in picks}
    for pick in nodes.values():
        _replace(ctx, pick)
    entry = ctx.facts.entry
    if picks and entry is not None and not _one_column(run.result):
        ctx.refuse(
            entry.file,
            entry.node,
            "KV290",
            "A prompt token is picked in some cases only, or the logits of prefill have a shape that is not certain.",
            "Pick each row's last token whenever there is more than one column.",
        )
    return bool(picks)


def add_pick(ctx: Context) -> bool:
    """Let a model that gives logits of all columns pick each row's last token before its head; False when the call of
    the head is not found. A reader of the last column then finds it in the only one.
    """
    run, entry = ctx.facts.prefill, ctx.facts.entry
    assert run is not None and entry is not None
    frame = next((f for f in run.walk.frames if f.parent is None and isinstance(f.func, ast.FunctionDef)), None)
    if frame is None or not isinstance(frame.func, ast.FunctionDef) or not _reads_last_column(ctx):
        return False
    for stmt in statements(frame.func.body):
        env = frame.env_before.get(id(stmt))
        if env is None or not isinstance(stmt, (ast.Assign, ast.AnnAssign, ast.Return)):
            continue
        for node in ast.walk(stmt):
            value = frame.values.get(id(node)) if isinstance(node, ast.Call) else None
            if not (isinstance(node, ast.Call) and isinstance(value, Tensor) and value.op == "linear" and value.stream):
                continue
            arg = node.args[0] if len(node.args) == 1 and not node.keywords else None
            given = env.get(arg.id) if isinstance(arg, ast.Name) else None
            meta = _metadata(ctx, frame, stmt)
            if not (isinstance(arg, ast.Name) and isinstance(given, Tensor) and _all_columns(given)) or meta is None:
                return False
            text = f"{arg.id} = {meta}.last_token({arg.id}).unsqueeze(1)\n"
            unit = ctx.unit(frame.func, frame.file)
            insert_before(ctx.edit_set(frame.file), stmt, text, "each row's last real token", unit)
            ctx.use(frame.func, {meta, arg.id})
            return True
    return False


def _all_columns(t: Tensor) -> bool:
    return t.shape is not None and len(t.shape) == 3 and t.shape[1] == Dim.atom("S")


def _reads_last_column(ctx: Context) -> bool:
    """Does the code around the model take `[:, -1]` of something, and nothing by a computed column?"""
    return any(
        isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple) and len(n.slice.elts) > 1
        and _everything(n.slice.elts[0]) and _minus_one(n.slice.elts[1])
        for f in ctx.facts.program.files.values()
        for n in ast.walk(f.tree)
    )


def _one_column(result: Value) -> bool:
    """Are all tensors that prefill returns of one column (or none)?"""
    found = [t for t in _flatten(result) if t.stream]
    return bool(found) and all(t.rank == 2 or (t.shape is not None and t.shape[1] == const(1)) for t in found)


def _flatten(value: Value, depth: int = 0) -> list[Tensor]:
    """The tensors in a returned value: itself, items of tuples and dicts, fields of objects."""
    if isinstance(value, Tensor):
        return [value]
    if depth > 3:
        return []
    held: list[Value] = []
    for name in ("items", "kwargs", "attrs", "args"):
        part = getattr(value, name, None)
        held += list(part) if isinstance(part, list) else list(part.values()) if isinstance(part, dict) else []
    return [t for v in held for t in _flatten(v, depth + 1)]


def _columns(t: Tensor) -> bool:
    """Does the operation mix columns (the prompt axis), and leave one or none of them?"""
    mixed = t.attrs.get("mixed") or ()
    return any("S" in dim.atoms for dim in mixed)


def _in_attention(ctx: Context, t: Tensor) -> bool:
    entries = {id(a.entry) for a in ctx.facts.attentions}
    return t.frame is not None and any(id(f.func) in entries for f in t.frame.chain())


def _replace(ctx: Context, pick: Tensor) -> None:
    frame, node = pick.frame, pick.node
    assert frame is not None
    source = _source(pick, node)
    rank = (pick.parents[0].rank or 0) if isinstance(pick.parents[0], Tensor) else 0
    meta = _metadata(ctx, frame, pick.stmt)
    if source is None or meta is None or rank != 3 or pick.rank not in (2, 3) or not _last(pick, node):
        ctx.refuse(
            frame.file,
            node if isinstance(node, ast.expr) else frame.func or frame.file.tree,
            "KV290",
            "The model picks a prompt token in a way that is not known to be each row's last.",
            "Pick it by `[:, -1]`, or gather it at the largest position of each row.",
        )
        return
    text = f"{meta}.last_token({frame.file.segment(source)})" + (".unsqueeze(1)" if pick.rank == 3 else "")
    assert isinstance(node, ast.expr)
    replace_expr(ctx.edit_set(frame.file), node, text, "each row's last real token")
    if isinstance(frame.func, ast.FunctionDef):
        gone = [n for n in ast.walk(node) if n is not source]
        ctx.dropped_args |= {id(n) for n in gone if isinstance(n, ast.Name) and not _within(source, n)}
        key = id(frame.func)
        ctx.functions.setdefault(key, Func(frame.func, frame.file, frame.owner))
        ctx.freed.setdefault(key, set()).update(names_read([node]) - names_read([source]))


def _within(outer: ast.AST, node: ast.AST) -> bool:
    return any(n is node for n in ast.walk(outer))


def _metadata(ctx: Context, frame: Frame, at: ast.stmt | None) -> str | None:
    """The metadata's name in the frame; the attention's thread may have brought it here already."""
    func = frame.func
    if not isinstance(func, ast.FunctionDef):
        return None
    if any(node is func for _, node, name, _ in ctx.added if name == META):
        ctx.use(func, {META})
        return META
    return thread_metadata(ctx, frame, at)


def _source(pick: Tensor, node: ast.AST | None) -> ast.expr | None:
    """The expression that the token is picked from."""
    if isinstance(node, ast.Subscript):
        return node.value
    if not isinstance(node, ast.Call):
        return None
    method = isinstance(node.func, ast.Attribute) and leaf(node.func.value) != "torch"
    options: list[ast.expr] = [node.func.value] if method and isinstance(node.func, ast.Attribute) else []
    options += [*node.args, *(k.value for k in node.keywords)]
    assert pick.frame is not None
    return next((e for e in options if pick.frame.values.get(id(e)) is pick.parents[0]), None)


def _last(pick: Tensor, node: ast.AST | None) -> bool:
    """Is it the last column, or an index made of positions?"""
    if isinstance(node, ast.Subscript) and len(pick.parents) < 2:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        fits = len(parts) in (2, 3) and all(map(_everything, [parts[0], *parts[2:]]))
        return fits and _minus_one(parts[1])
    index = [p for p in pick.parents[1:] if isinstance(p, Tensor)]
    ops = {t.op for t in ancestors(index)}
    roots = {op for op in ops if op.startswith("input:")}
    return bool(roots) and roots <= {"input:position_ids"} and not (ops - roots - _INDEX)


def _everything(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.lower is None and node.upper is None and node.step is None


def _minus_one(node: ast.expr) -> bool:
    """`-1` or `-1:`"""
    if isinstance(node, ast.Slice):
        return node.upper is None and node.step is None and node.lower is not None and _minus_one(node.lower)
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and node.operand.value == 1
    )
