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
from kvskill.implementer.standalone.graph import marks_static
from kvskill.implementer.textops import (
    insert_before,
    remove_statements,
    replace_expr,
    replace_statement,
    statements,
)
from kvskill.source import SourceFile

__all__ = ["Loop", "convert_loop", "find_loops", "rewritten_caches"]


@dataclass(frozen=True, eq=False)
class Loop:
    """A function with a prefill call and a decode call of the model."""

    inside: Function
    prefill: ast.Call
    decode: ast.Call
    first: dict[str, ast.expr]  # arguments of the prefill call by name
    later: dict[str, ast.expr]


def find_loops(
    file: SourceFile, owner: ast.ClassDef | None, params: list[str], allocator: str
) -> tuple[list[Loop], list[ast.Call]]:
    """Loops of the class, and model calls that are in none.

    `params` are the names of the model's forward, by which positional arguments are read; `allocator` is the method
    that gives the caches.
    """
    loops: list[Loop] = []
    left: list[ast.Call] = []
    for func in functions(file):
        if func.owner is not owner:
            continue
        caches = _from_allocator(func.node, allocator)
        calls = []
        for n in ast.walk(func.node):
            given = _given(n, params) if isinstance(n, ast.Call) else None
            if given is not None and isinstance(n, ast.Call) and _is_model_call(n, given, caches):
                calls.append((n, given))
        calls.sort(key=lambda c: c[0].lineno)
        first = [c for c in calls if _phase(c[1]) is True]
        later = [c for c in calls if _phase(c[1]) is False]
        if len(first) == 1 and len(later) == 1 and len(calls) == 2:
            loops.append(Loop(func, first[0][0], later[0][0], first[0][1], later[0][1]))
        else:
            left.extend(c for c, _ in calls)
    return loops, left


def _given(call: ast.Call, params: list[str]) -> dict[str, ast.expr] | None:
    """Arguments by name; None when they cannot be told."""
    if any(isinstance(a, ast.Starred) for a in call.args) or len(call.args) > len(params):
        return None
    return dict(zip(params, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg is not None}


def _from_allocator(func: ast.FunctionDef, allocator: str) -> set[str]:
    """Names that are bound to what the allocating method returns."""
    return {
        name
        for n in ast.walk(func)
        if isinstance(n, ast.Assign) and any(isinstance(c, ast.Call) and leaf(c.func) == allocator for c in ast.walk(n))
        for t in n.targets
        if (name := own_name(t)) is not None
    }


def _is_model_call(node: ast.Call, given: dict[str, ast.expr], caches: set[str]) -> bool:
    """A call that hands over tokens and caches; one with positional arguments must hand over the allocator's."""
    held = next((given[name] for name in CACHES if name in given), None)
    if held is None or "input_ids" not in given:
        return False
    if all(any(k.arg == name for k in node.keywords) for name in ("input_ids", *(set(CACHES) & set(given)))):
        return True
    return any((own_name(n) or "") in caches for n in ast.walk(held))


def _phase(given: dict[str, ast.expr]) -> bool | None:
    value = given.get("is_prefill")
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, bool) else None


def convert_loop(ctx: Context, loop: Loop, me: str, picked: bool = False) -> bool:
    """All edits of one loop; False when a part of it was refused. `picked`: the model picks each row's last token."""
    node, file = loop.inside.node, loop.inside.file
    mask = _mask(node)
    if mask is None:
        _refuse(ctx, file, node, "the tokenizer's result is not bound to one name before prefill")
        return False
    lengths, positions = loop.later.get("kv_len"), loop.later.get("position_ids")
    first_positions = loop.first.get("position_ids")
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
    if marks_static(ctx):
        step += f"{meta}.mark_static()\n"
    call_stmt = _statement(node, loop.decode)
    inside = list(statements(decode_loop.body))
    old = [s for n in (lengths.id, positions.id) for s in _assigns(node, n) if s in inside]
    _put(ctx, file, node, sorted(old, key=lambda s: s.lineno), call_stmt, step, unit)
    for call in (loop.prefill, loop.decode):
        last = call.keywords[-1] if call.keywords else call.args[-1]
        start, end = file.byte_range(last)
        line = max(s for s in file.line_starts if s <= start)
        lead = file.raw[line:start].decode()
        gap = ",\n" + lead if not lead.strip() else ", "
        edits.add(end, end, f"{gap}forward_metadata={meta}", "hand the metadata on")
    for pick in picks:
        text = f"{meta}.last_token({file.segment(pick.value)})" + (".unsqueeze(1)" if _keeps_axis(pick) else "")
        replace_expr(edits, pick, text, "each row's last real token")
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
    ids = loop.first["input_ids"]
    caches = next(loop.first[name] for name in CACHES if name in loop.first)
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


def rewritten_caches(loop: Loop) -> list[ast.AST]:
    """Expressions of the caches that the conversion replaces: the rows of a mini-batch."""
    batch = _mini_batch(loop.inside.file, loop.inside.node, loop)
    return [batch.caches] if isinstance(batch, _Batch) else []


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
    """`logits[:, -1]` of the prefill call's result, between that call and the decode call. None when there is none,
    or when the result is read in a way that is not followed.
    """
    names = _results(node, loop)
    found = [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Subscript)
        and loop.prefill.lineno < n.lineno < loop.decode.lineno
        and _last_column(n.slice)
        and _is_result(n.value, names)
    ]
    return found or None


def _results(node: ast.FunctionDef, loop: Loop) -> set[str]:
    """Names that hold the prefill call's result or logits [B, S, ..] made of it."""
    made = _statement(node, loop.prefill)
    names = {n for t in getattr(made, "targets", []) if (n := own_name(t)) is not None}
    for _ in range(4):
        for s in _between(node, loop):
            if isinstance(s, ast.Assign) and _is_result(s.value, names) and not isinstance(s.value, ast.Name):
                names |= {n for t in s.targets if (n := own_name(t)) is not None}
    return names


def _between(node: ast.FunctionDef, loop: Loop) -> list[ast.stmt]:
    return [s for s in statements(node.body) if loop.prefill.lineno <= s.lineno < loop.decode.lineno]


_SAME_ROWS = ("float", "to", "cpu", "softmax", "log_softmax", "argmax", "div", "detach", "clone", "contiguous")


def _is_result(value: ast.expr, names: set[str]) -> bool:
    """A name of the result, a field or item of it, or an operation that keeps its rows and columns."""
    if own_name(value) in names:
        return True
    if isinstance(value, ast.Attribute):
        return _is_result(value.value, names)
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Constant) and _is_result(value.value, names)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Div, ast.Mult)):
        return _is_result(value.left, names)
    if isinstance(value, ast.Call) and leaf(value.func) in _SAME_ROWS and not _keeps_dim(value):
        inner = value.func.value if isinstance(value.func, ast.Attribute) else None
        if inner is not None and leaf(inner) not in ("torch", "F", "functional"):
            return _is_result(inner, names)
        return bool(value.args) and _is_result(value.args[0], names)
    return False


def _keeps_dim(call: ast.Call) -> bool:
    """An argmax that is not over the last axis (or keeps it) leaves other axes than [B, S]."""
    if leaf(call.func) != "argmax":
        return False
    given = [k.value for k in call.keywords if k.arg == "dim"] or call.args[-1:]
    last = bool(given) and ast.unparse(given[0]) == "-1"
    return not last or any(k.arg == "keepdim" for k in call.keywords)


def _keeps_axis(pick: ast.Subscript) -> bool:
    """`[:, -1:]` keeps the column axis, `[:, -1]` does not."""
    assert isinstance(pick.slice, ast.Tuple)
    return isinstance(pick.slice.elts[1], ast.Slice)


def _last_column(index: ast.expr) -> bool:
    """`[:, -1]`, `[:, -1:]` and both with a third `:`"""
    if not isinstance(index, ast.Tuple) or len(index.elts) not in (2, 3):
        return False
    whole = [index.elts[0], *index.elts[2:]]
    if not all(isinstance(e, ast.Slice) and not e.lower and not e.upper and not e.step for e in whole):
        return False
    second = index.elts[1]
    if isinstance(second, ast.Slice):
        if second.upper or second.step or second.lower is None:
            return False
        second = second.lower
    return (
        isinstance(second, ast.UnaryOp)
        and isinstance(second.op, ast.USub)
        and isinstance(second.operand, ast.Constant)
        and second.operand.value == 1
    )
