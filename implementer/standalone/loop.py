"""The generation loop of a runner that calls its model directly: positions, lengths and the last token by row.

Padded batches used to be handled as if every row were full. The metadata of a step knows the real tokens, so the
positions, the column of the last prompt token and the lengths come from it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kvskill.analyzer.runner.files import Function, functions, leaf, own_name
from kvskill.analyzer.runner.walkrun import CACHES
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import (
    insert_before,
    remove_statements,
    replace_expr,
    replace_statement,
    statements,
)
from kvskill.source import SourceFile

__all__ = ["Loop", "convert_loop", "find_loops"]


@dataclass(frozen=True, eq=False)
class Loop:
    """A function with a prefill call and a decode call of the model."""

    inside: Function
    prefill: ast.Call
    decode: ast.Call


def find_loops(file: SourceFile, owner: ast.ClassDef | None) -> tuple[list[Loop], list[ast.Call]]:
    """Loops of the class, and model calls that are in none."""
    loops, left = [], []
    for func in functions(file):
        if func.owner is not owner:
            continue
        calls = [n for n in ast.walk(func.node) if isinstance(n, ast.Call) and _is_model_call(n)]
        calls.sort(key=lambda c: c.lineno)
        first = [c for c in calls if _phase(c) is True]
        later = [c for c in calls if _phase(c) is False]
        if len(first) == 1 and len(later) == 1 and len(calls) == 2:
            loops.append(Loop(func, first[0], later[0]))
        else:
            left.extend(calls)
    return loops, left


def _is_model_call(node: ast.Call) -> bool:
    return any(k.arg in CACHES for k in node.keywords) and any(k.arg == "input_ids" for k in node.keywords)


def _phase(node: ast.Call) -> bool | None:
    value = _keyword(node, "is_prefill")
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, bool) else None


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in node.keywords if k.arg == name), None)


def convert_loop(ctx: Context, loop: Loop, me: str, picked: bool = False) -> bool:
    """All edits of one loop; False when a part of it was refused. `picked`: the model picks each row's last token."""
    node, file = loop.inside.node, loop.inside.file
    mask = _mask(node)
    if mask is None:
        _refuse(ctx, file, node, "the tokenizer's result is not bound to one name before prefill")
        return False
    lengths, positions = _keyword(loop.decode, "kv_len"), _keyword(loop.decode, "position_ids")
    first_positions = _keyword(loop.prefill, "position_ids")
    if not isinstance(lengths, ast.Name) or not isinstance(positions, ast.Name):
        _refuse(ctx, file, loop.decode, "the decode call does not pass kv_len and position_ids by name")
        return False
    batch = _mini_batch(file, node, loop)
    if isinstance(batch, str):
        _refuse(ctx, file, loop.prefill, batch)
        return False
    if batch is None and not isinstance(first_positions, ast.Name):
        _refuse(ctx, file, loop.prefill, "the prefill call does not pass position_ids by name")
        return False
    decode_loop = _around(node, loop.decode)
    picks = [] if picked else _picks(node, loop)
    if decode_loop is None or picks is None:
        what = "decode is not in a loop" if decode_loop is None else "the next token is not taken from `[:, -1]`"
        _refuse(ctx, file, loop.decode if decode_loop is None else loop.prefill, what)
        return False
    meta = ctx.fresh_name(node, "forward_metadata")
    unit = ctx.unit(node, file)
    edits = ctx.edit_set(file)
    # prefill
    call_stmt = _statement(node, loop.prefill)
    if batch is not None:
        step = f"{meta} = {me}.paged_kv.prefill({mask}[{batch.rows}], {batch.first})  # rows of this mini-batch\n"
        insert_before(edits, call_stmt, step, "metadata of the mini-batch", unit)
        replace_expr(edits, batch.caches, batch.whole, "the table finds the rows")
        assert first_positions is not None
        replace_expr(edits, first_positions, f"{meta}.position_ids", "positions by row")
    else:
        assert isinstance(first_positions, ast.Name)
        step = f"{meta} = {me}.paged_kv.prefill({mask})\n{first_positions.id} = {meta}.position_ids\n"
        old = [s for s in _assigns(node, first_positions.id) if s.lineno < call_stmt.lineno]
        _put(ctx, file, node, old, call_stmt, step, unit)
    # decode
    step = (
        f"{lengths.id} = {me}.paged_kv.kv_len  # tokens in the cache, by row\n"
        f"{meta} = {me}.paged_kv.decode({lengths.id})\n"
        f"{positions.id} = {meta}.position_ids\n"
    )
    call_stmt = _statement(node, loop.decode)
    inside = list(statements(decode_loop.body))
    old = [s for n in (lengths.id, positions.id) for s in _assigns(node, n) if s in inside]
    _put(ctx, file, node, sorted(old, key=lambda s: s.lineno), call_stmt, step, unit)
    for call in (loop.prefill, loop.decode):
        end = file.byte_range(call.keywords[-1].value)[1]
        start = file.byte_range(call.keywords[-1])[0]
        line = max(s for s in file.line_starts if s <= start)
        lead = file.raw[line:start].decode()
        gap = ",\n" + lead if not lead.strip() else ", "
        edits.add(end, end, f"{gap}forward_metadata={meta}", "hand the metadata on")
    for pick in picks:
        start, end = file.byte_range(pick)
        edits.add(start, end, f"{meta}.last_token({file.segment(pick.value)})", "each row's last real token")
    return True


@dataclass(frozen=True, eq=False)
class _Batch:
    """A prefill mini-batch: the text of its row slice, of its first row and of the whole caches."""

    rows: str
    first: str
    caches: ast.expr
    whole: str


def _mini_batch(file: SourceFile, node: ast.FunctionDef, loop: Loop) -> _Batch | str | None:
    """The mini-batch of the prefill call, None when it takes all rows, or what is not understood."""
    ids = _keyword(loop.prefill, "input_ids")
    caches = next(k.value for k in loop.prefill.keywords if k.arg in CACHES)
    inside = _around(node, loop.prefill)
    if inside is None and isinstance(ids, (ast.Name, ast.Attribute)) and own_name(caches) is not None:
        return None
    if inside is None or not isinstance(ids, ast.Subscript):
        return "prefill gets a part of the rows in a form other than `input_ids[rows]` in a loop"
    index: ast.expr = ids.slice
    bounds = index
    if isinstance(index, ast.Name):
        found = [s.value for s in _assigns(node, index.id) if isinstance(s, ast.Assign)]
        if len(found) != 1:
            return "the row slice of the mini-batch is bound more than once"
        bounds = found[0]
    first: ast.expr | None = None
    if isinstance(bounds, ast.Slice):
        first = bounds.lower
    elif isinstance(bounds, ast.Call) and leaf(bounds.func) == "slice" and len(bounds.args) == 2:
        first = bounds.args[0]
    else:
        return "the rows of the mini-batch are not a slice"
    if not (
        isinstance(caches, ast.ListComp)
        and len(caches.generators) == 1
        and own_name(caches.generators[0].iter) is not None
        and isinstance(caches.elt, ast.Tuple)
        and all(isinstance(e, ast.Subscript) and ast.dump(e.slice) == ast.dump(index) for e in caches.elt.elts)
    ):
        return "the caches of the mini-batch are not `[(k[rows], v[rows]) for k, v in caches]`"
    return _Batch(
        file.segment(index), file.segment(first) if first is not None else "0", caches,
        file.segment(caches.generators[0].iter),
    )


def _refuse(ctx: Context, file: SourceFile, node: ast.AST, what: str) -> None:
    ctx.refuse(
        file,
        node,
        "KV290",
        f"The generation loop is not understood: {what}.",
        "Write it as tokenizer call, one prefill call, and a loop with one decode call.",
    )


def _mask(node: ast.FunctionDef) -> str | None:
    """`<tokenizer result>.attention_mask`: the only name bound from a call of a tokenizer."""
    names = []
    for n in ast.walk(node):
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name):
            for c in ast.walk(n.value):
                if not isinstance(c, ast.Call):
                    continue
                if "tokenizer" in (leaf(c.func) or "") or (
                    isinstance(c.func, ast.Attribute)
                    and c.func.attr in ("apply_chat_template", "batch_encode_plus")
                    and "tokenizer" in (leaf(c.func.value) or "")
                ):
                    names.append(n.targets[0].id)
                    break
    return f"{names[0]}.attention_mask" if len(set(names)) == 1 else None


def _around(node: ast.FunctionDef, call: ast.Call) -> ast.For | ast.While | None:
    for n in ast.walk(node):
        if isinstance(n, (ast.For, ast.While)) and any(c is call for s in n.body for c in ast.walk(s)):
            return n
    return None


def _statement(node: ast.FunctionDef, call: ast.Call) -> ast.stmt:
    """The innermost statement that holds the call."""
    found = [s for s in statements(node.body) if any(n is call for n in ast.walk(s))]
    return found[-1]


def _assigns(node: ast.FunctionDef, name: str) -> list[ast.stmt]:
    """Statements that bind nothing but this name."""
    out: list[ast.stmt] = []
    for s in statements(node.body):
        assigned = isinstance(s, ast.Assign) and len(s.targets) == 1 and own_name(s.targets[0]) == name
        if assigned or (isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name) and s.target.id == name):
            out.append(s)
    return out


def _put(
    ctx: Context,
    file: SourceFile,
    node: ast.FunctionDef,
    old: list[ast.stmt],
    call_stmt: ast.stmt,
    text: str,
    unit: str,
) -> None:
    """Replace the old assignments by the step; it stands where the last of them was, before the clock starts."""
    edits = ctx.edit_set(file)
    ahead = [s for s in old if s.lineno < call_stmt.lineno and s.col_offset == call_stmt.col_offset]
    rest = set(old) - set(ahead[-1:])
    if ahead:
        replace_statement(edits, ahead[-1], text, "positions and lengths by row", unit)
    else:
        insert_before(edits, call_stmt, text, "positions and lengths by row", unit)
    if rest:
        remove_statements(edits, node, rest, "lengths come from the metadata")


def _picks(node: ast.FunctionDef, loop: Loop) -> list[ast.Subscript] | None:
    """`logits[:, -1]` between the prefill call and the decode call."""
    found = [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Subscript)
        and loop.prefill.lineno < n.lineno < loop.decode.lineno
        and _last_column(n.slice)
    ]
    return found or None


def _last_column(index: ast.expr) -> bool:
    if not isinstance(index, ast.Tuple) or len(index.elts) not in (2, 3):
        return False
    first, second = index.elts[:2]
    if not isinstance(first, ast.Slice) or first.lower or first.upper:
        return False
    if len(index.elts) == 3:
        third = index.elts[2]
        if not isinstance(third, ast.Slice) or third.lower or third.upper:
            return False
    return (
        isinstance(second, ast.UnaryOp)
        and isinstance(second.op, ast.USub)
        and isinstance(second.operand, ast.Constant)
        and second.operand.value == 1
    )
