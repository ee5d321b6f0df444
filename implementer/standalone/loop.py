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
from kvskill.implementer.standalone.flow import Flow
from kvskill.implementer.standalone.graph import marks_static
from kvskill.implementer.standalone.places import (
    Place,
    assigns,
    derived,
    find_place,
    other_bindings,
    other_reads,
    out_of_order,
    own_nodes,
)
from kvskill.implementer.standalone.proof import (
    Doubt,
    counts_on,
    from_zero,
    into_empty,
    mask_text,
    own_tokens,
    tokenizer_call,
    tokenizers,
)
from kvskill.implementer.standalone.tokenpick import Pick, find_picks
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


def convert_loop(ctx: Context, loop: Loop, me: str, allocator: str, picked: bool = False) -> bool:
    """All edits of one loop; False when a part of it was refused. `picked`: the model picks each row's last token."""
    plan = _understand(loop, allocator, picked)
    if isinstance(plan, Doubt):
        ctx.refuse(
            loop.inside.file, plan.node, "KV290", f"The generation loop is not understood: {plan.what}.", plan.todo
        )
        return False
    node, file = loop.inside.node, loop.inside.file
    meta, unit, edits = ctx.fresh_name(node, "forward_metadata"), ctx.unit(node, file), ctx.edit_set(file)
    first_positions, batch = loop.first["position_ids"], plan.batch
    step = f"{meta} = {me}.paged_kv.prefill({plan.mask})\n"
    if batch is not None:
        step = f"{meta} = {me}.paged_kv.prefill({plan.mask}[{batch.rows}], {batch.first})  # rows of this mini-batch\n"
        replace_expr(edits, batch.caches, batch.whole, "the table finds the rows")
    if batch is None and isinstance(first_positions, ast.Name):
        step += f"{first_positions.id} = {meta}.position_ids\n"
    else:
        replace_expr(edits, first_positions, f"{meta}.position_ids", "positions by row")
    _put(ctx, file, node, plan.first, step, unit)
    lengths, positions = loop.later["kv_len"], loop.later["position_ids"]
    length = lengths.id if isinstance(lengths, ast.Name) else ctx.fresh_name(node, "paged_kv_len")
    if not isinstance(lengths, ast.Name):
        replace_expr(edits, lengths, length, "lengths by row")
    step = (
        f"{length} = {me}.paged_kv.kv_len  # tokens in the cache, by row\n"
        f"{meta} = {me}.paged_kv.decode({length})\n"
    )
    if isinstance(positions, ast.Name):
        step += f"{positions.id} = {meta}.position_ids\n"
    else:
        replace_expr(edits, positions, f"{meta}.position_ids", "positions by row")
    if marks_static(ctx):
        step += f"{meta}.mark_static()\n"
    _put(ctx, file, node, plan.later, step, unit)
    for call in (loop.prefill, loop.decode):
        last = call.keywords[-1] if call.keywords else call.args[-1]
        start, end = file.byte_range(last)
        line = max(s for s in file.line_starts if s <= start)
        lead = file.raw[line:start].decode()
        gap = ",\n" + lead if not lead.strip() else ", "
        edits.add(end, end, f"{gap}forward_metadata={meta}", "hand the metadata on")
    for pick in plan.picks:
        text = f"{meta}.last_token({file.segment(pick.source)})" + (".unsqueeze(1)" if pick.keeps_axis else "")
        replace_expr(edits, pick.node, text, "each row's last real token")
    return True


@dataclass(frozen=True, eq=False)
class _Plan:
    """A loop that is understood: the mask's text, the mini-batch, where the steps stand, and the picks."""

    mask: str
    batch: _Batch | None
    first: Place
    later: Place
    picks: list[Pick]


_FORM = "Write it as tokenizer call, one prefill call, and a loop with one decode call."


def _understand(loop: Loop, allocator: str, picked: bool) -> _Plan | Doubt:
    """What is to be edited, or the first place that is not certain."""
    node, file = loop.inside.node, loop.inside.file
    lengths, positions = loop.later.get("kv_len"), loop.later.get("position_ids")
    first_positions = loop.first.get("position_ids")
    if lengths is None or positions is None or first_positions is None:
        at = loop.prefill if first_positions is None else loop.decode
        return Doubt(at, "the model is called without kv_len or position_ids", _FORM)
    around, outer = _around(node, loop.decode), _around(node, loop.prefill)
    if outer is not None and any(n is loop.decode for n in ast.walk(outer)):
        todo = "Make what is done for one prompt a method of its own, and call it in this loop."
        return Doubt(outer, "prefill and decode stand together in a loop, so there is a step for each round", todo)
    closed = next((c for c in (loop.prefill, loop.decode) if not _passes_on(loop.inside, c)), None)
    if closed is not None:
        todo = "Take **kwargs there and hand them to the model as they are."
        return Doubt(closed, "the model is called through a method that does not pass on all keywords", todo)
    batch = _mini_batch(file, node, loop)
    if isinstance(batch, str):
        return Doubt(loop.prefill, batch, _FORM)
    if around is None:
        return Doubt(loop.decode, "decode is not in a loop", _FORM)
    first, later = _statement(node, loop.prefill), _statement(node, loop.decode)
    known = tokenizers(file.tree)
    flow = Flow(node, lambda call: tokenizer_call(call, known), column=loop.later["input_ids"]).run()
    mask = mask_text(flow, first)
    if mask is None:
        return _no_mask(node, known)
    ids = loop.first["input_ids"]
    old_first = assigns(node.body, leaf(first_positions) or "")
    bound = [assigns(around.body, leaf(e) or "") or assigns(node.body, leaf(e) or "") for e in (lengths, positions)]
    start = first_positions
    if batch is not None and isinstance(start, ast.Subscript) and isinstance(ids, ast.Subscript):
        start = start.value if ast.dump(start.slice) == ast.dump(ids.slice) else start
    doubt = (
        own_tokens(flow, first, ids.value if batch is not None and isinstance(ids, ast.Subscript) else ids)
        or (into_empty(flow, first, loop.first["kv_len"]) if "kv_len" in loop.first else None)
        or from_zero(flow, first, start, [s for s in old_first if s.lineno < first.lineno])
        or counts_on(flow, later, lengths, bound[0], "lengths")
        or counts_on(flow, later, positions, bound[1], "positions")
    )
    if doubt is not None:
        return doubt
    places = _places(node, loop, allocator, first, later, around, flow)
    if isinstance(places, Doubt):
        return places
    picks = [] if picked else find_picks(node, first, later, around, flow)
    if isinstance(picks, Doubt):
        return picks
    if not picks and not picked:
        return Doubt(loop.prefill, "the next token is not taken from `[:, -1]`", _FORM)
    mask = mask_text(flow, places[0].at) or mask
    return _Plan(mask, batch, places[0], places[1], picks)


def _passes_on(inside: Function, call: ast.Call) -> bool:
    """Does the call reach the model as it is: directly, or through a method whose keywords all go on to one call?"""
    found = [f for f in functions(inside.file) if f.node.name == leaf(call.func) and f.owner is inside.owner]
    given = {k.arg for k in call.keywords}
    for target in found:
        rest = target.node.args.kwarg
        own = {a.arg for a in [*target.node.args.args, *target.node.args.kwonlyargs]}
        nodes = list(ast.walk(target.node))
        reads = [n for n in nodes if rest is not None and isinstance(n, ast.Name) and n.id == rest.arg]
        handed = [k.value for c in nodes if isinstance(c, ast.Call) for k in c.keywords if k.arg is None]
        if len(reads) != 1 or reads[0] not in handed or own & given or "input_ids" not in given:
            return False
    return True


def _no_mask(node: ast.FunctionDef, known: frozenset[str]) -> Doubt:
    """No name holds the tokenizer's result (or its mask) at the prefill call."""
    calls = (n for s in statements(node.body) for n in own_nodes(s) if isinstance(n, ast.Call))
    made = [c for c in calls if tokenizer_call(c, known)]
    return Doubt(
        made[-1] if made else node,
        "the tokenizer's result is not bound to one name before prefill, so that its attention_mask is at hand",
        "Keep the result (`inputs = tokenizer(..)`) and take `inputs.input_ids` from it.",
    )


def _places(
    node: ast.FunctionDef, loop: Loop, allocator: str, first: ast.stmt, later: ast.stmt, around: ast.stmt, flow: Flow
) -> tuple[Place, Place] | Doubt:
    """Where the steps of prefill and decode stand; nobody else may read what they bind anew."""
    inside = {id(n) for n in ast.walk(around)} - {id(n) for n in ast.walk(getattr(around, "iter", ast.Pass()))}
    end = around.end_lineno or 0

    def in_loop(n: ast.AST) -> bool:
        return id(n) in inside or getattr(n, "lineno", 0) > end

    names = {e.id for k in ("kv_len", "position_ids") if isinstance(e := loop.later[k], ast.Name)}
    assert isinstance(around, (ast.For, ast.While))
    place = find_place(node, later, [s for n in names for s in assigns(around.body, n)], names)
    made = derived(node, place, later, names)
    doubt = (
        out_of_order(node, place, later, names, flow)
        or other_bindings(node, names, place.old, lambda n: id(n) in inside)
        or other_reads(node, place, later, names, in_loop)
        or other_reads(node, place, later, made, in_loop)
    )
    if doubt is not None:
        return doubt
    positions = loop.first["position_ids"]
    if not isinstance(positions, ast.Name):  # its expression is replaced
        return Place(first, ()), place
    own = {positions.id}
    old = [s for s in assigns(node.body, positions.id) if s.lineno < first.lineno]
    needs = [s for s in statements(node.body) if s.lineno < first.lineno and _needed(s, allocator, flow)]
    start = find_place(node, first, old, own, needs)
    bound = {n.id for n in ast.walk(around) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    doubt = (
        out_of_order(node, start, first, own, flow)
        or other_bindings(node, own, old, lambda n: getattr(n, "lineno", 0) < first.lineno)
        or other_reads(node, start, first, own, lambda n: not (own <= names and in_loop(n)), names)
        or other_reads(
            node, start, first, derived(node, start, first, own) - bound,
            lambda n: getattr(n, "lineno", 0) >= start.at.lineno,
        )
    )
    return doubt if doubt is not None else (start, place)


def _needed(s: ast.stmt, allocator: str, flow: Flow) -> bool:
    """Does the step of prefill need this statement before it: the caches, or the mask?"""
    if any(isinstance(n, ast.Call) and leaf(n.func) == allocator for n in own_nodes(s)):
        return True
    return mask_text(flow, s) is None


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
        found = [s.value for s in assigns(node.body, index.id) if isinstance(s, ast.Assign)]
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


def _around(node: ast.FunctionDef, call: ast.Call) -> ast.For | ast.While | None:
    for n in ast.walk(node):
        if isinstance(n, (ast.For, ast.While)) and any(c is call for s in n.body for c in ast.walk(s)):
            return n
    return None


def _statement(node: ast.FunctionDef, call: ast.Call) -> ast.stmt:
    """The innermost statement that holds the call."""
    found = [s for s in statements(node.body) if any(n is call for n in ast.walk(s))]
    return found[-1]


def _put(ctx: Context, file: SourceFile, node: ast.FunctionDef, place: Place, text: str, unit: str) -> None:
    """Replace the old assignments by the step."""
    edits = ctx.edit_set(file)
    if place.at in place.old:
        replace_statement(edits, place.at, text, "positions and lengths by row", unit)
    else:
        insert_before(edits, place.at, text, "positions and lengths by row", unit)
    rest = set(place.old) - {place.at}
    if rest:
        remove_statements(edits, node, rest, "lengths come from the metadata")
