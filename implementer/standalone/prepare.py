"""The step's metadata where the model itself prepares its inputs (`prepare_inputs_for_generation` and its like)."""

from __future__ import annotations

import ast

from kvskill.analyzer.runner.files import Function, functions, leaf, own_name
from kvskill.analyzer.runner.topology import gathers
from kvskill.analyzer.runner.walkrun import CACHES
from kvskill.implementer.framework.context import Context
from kvskill.implementer.standalone.flow import Flow
from kvskill.implementer.standalone.formulas import Grid, Value, num, tensor
from kvskill.implementer.standalone.places import assigns
from kvskill.implementer.standalone.proof import Doubt, as_counted, from_zero
from kvskill.implementer.textops import body_start, insert_after, insert_before, remove_statements, statements
from kvskill.source import SourceFile

__all__ = ["convert_prepare", "find_prepare"]

_NEEDED = ("attention_mask", "kv_len", "is_prefill")


def find_prepare(file: SourceFile, owner: ast.ClassDef | None) -> tuple[Function, ast.Dict] | None:
    """The method of the allocating class that builds the model's inputs as a dict with the caches in it."""
    for func in functions(file):
        if func.owner is not owner:
            continue
        for node in ast.walk(func.node):
            keys = [k.value for k in node.keys if isinstance(k, ast.Constant)] if isinstance(node, ast.Dict) else []
            if isinstance(node, ast.Dict) and "input_ids" in keys and any(k in CACHES for k in keys):
                return func, node
    return None


def convert_prepare(ctx: Context, func: Function, made: ast.Dict, me: str, allocator: str) -> bool:
    """Build the metadata first (once the caches are there), from mask and lengths as they come in, and hand it on."""
    node, file = func.node, func.file
    params = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
    missing = [n for n in _NEEDED if n not in params]
    if missing:
        ctx.refuse(
            file,
            node,
            "KV290",
            f"`{node.name}` prepares the model's inputs without {', '.join(missing)}.",
            "Take the padding mask, the lengths and the phase as parameters.",
        )
        return False
    if not _reads_mask(node):
        ctx.refuse(
            file,
            node,
            "KV290",
            "`attention_mask` is not known to be the tokenizer's padding mask here.",
            "Count the prompt's positions from it (`attention_mask.long().cumsum(-1) - 1`).",
        )
        return False
    changed = _changed_lengths(node)
    if changed is not None:
        ctx.refuse(
            file,
            changed,
            "KV290",
            "`kv_len` is changed here, so that the model would not get the number of cached tokens.",
            "Hand `kv_len` on as it came in.",
        )
        return False
    stale = _stale_positions(node)
    if isinstance(stale, ast.AST):
        ctx.refuse(
            file,
            stale,
            "KV290",
            "`position_ids` is bound here in a way that is not understood.",
            "Bind it by plain assignments.",
        )
        return False
    guard = _guard(ctx, func)
    if guard is None:
        return False
    doubt = _positions(func, made)
    if doubt is not None:
        ctx.refuse(file, doubt.node, "KV290", f"In `{node.name}`, {doubt.what}.", doubt.todo)
        return False
    text = guard + (
        "# the step in the paged cache: slots, lengths and table, from the padding mask or the tokens cached so far\n"
        "if is_prefill:\n"
        f"    forward_metadata = {me}.paged_kv.prefill(attention_mask)\n"
        "else:\n"
        f"    kv_len = {me}.paged_kv.kv_len  # tokens in the cache, by row\n"
        f"    forward_metadata = {me}.paged_kv.decode(kv_len)\n"
    )
    if any(isinstance(k, ast.Constant) and k.value == "position_ids" for k in made.keys):
        text += "position_ids = forward_metadata.position_ids\n"
        remove_statements(ctx.edit_set(file), node, set(stale), "positions by row come from the metadata")
    edits = ctx.edit_set(file)
    _insert(ctx, func, allocator, text)
    first = made.keys[0]
    assert first is not None
    at = file.byte_range(first)[0]
    line = max(s for s in file.line_starts if s <= at)
    lead = file.raw[line:at].decode()
    gap = "\n" + lead if not lead.strip() else " "
    edits.add(at, at, f'"forward_metadata": forward_metadata,{gap}', "hand the metadata on")
    return True


def _insert(ctx: Context, func: Function, allocator: str, text: str) -> None:
    """After the checks, and after the statement that allocates the caches where that is done here."""
    edits, unit = ctx.edit_set(func.file), ctx.unit(func.node, func.file)
    makes = [
        s
        for s in func.node.body
        if any(isinstance(n, ast.Call) and leaf(n.func) == allocator for n in ast.walk(s))
    ]
    first = _after_checks(func.node)
    if makes and makes[-1].lineno >= first.lineno:
        insert_after(edits, makes[-1], text, "metadata of the step", unit)
    else:
        insert_before(edits, first, text, "metadata of the step", unit)


def _guard(ctx: Context, func: Function) -> str | None:
    """An error, in the code's own terms, for topologies in which attention sees the rows of several ranks."""
    tests: list[str] = []
    for found, call, test in gathers([func.file]):
        if found.node is not func.node:
            continue
        own = {a.arg for a in func.node.args.args}
        if test is None or not own >= {n.id for n in ast.walk(test.test) if isinstance(n, ast.Name)} - {"batch_size"}:
            ctx.refuse(
                func.file,
                call,
                "KV290",
                "Lengths are gathered over ranks here, whatever the topology.",
                "Gather them only where several ranks share their rows, under a test of the parallel sizes.",
            )
            return None
        if not any(isinstance(n, ast.Name) and n.id in ("kv_len", "batch_size") for n in ast.walk(test.test)):
            tests.append(func.file.segment(test.test))
    if not tests:
        return ""
    return (
        f"if {tests[0]}:\n"
        '    raise NotImplementedError("the paged step describes the rows of one rank: keep attn_dp_size 1")\n'
    )


def _after_checks(node: ast.FunctionDef) -> ast.stmt:
    """After leading guards that only raise."""
    first = body_start(node)
    stmts = node.body[node.body.index(first) :]
    for stmt in stmts:
        guard = isinstance(stmt, ast.If) and all(isinstance(s, ast.Raise) for s in stmt.body) and not stmt.orelse
        sizes = isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Call) and leaf(stmt.value.func) == "size"
        shape = isinstance(stmt, ast.Assign) and isinstance(stmt.value, ast.Attribute) and stmt.value.attr == "shape"
        if not (guard or sizes or shape):
            return stmt
    return stmts[-1]


def _reads_mask(node: ast.FunctionDef) -> bool:
    """`attention_mask....cumsum(..)`: only a [B, S] padding mask is counted."""
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and leaf(n.func) == "cumsum":
            if any(isinstance(x, ast.Name) and x.id == "attention_mask" for x in ast.walk(n)):
                return True
    return False


def _positions(func: Function, made: ast.Dict) -> Doubt | None:
    """Are the positions that the dict gets those of the paged step, in both phases?"""
    keys = [k.value if isinstance(k, ast.Constant) else None for k in made.keys]
    if "position_ids" not in keys:
        return None
    given = made.values[keys.index("position_ids")]
    node = func.node
    at = [s for s in statements(node.body) if any(n is made for n in ast.walk(s))][-1]
    gathered = frozenset(id(test) for _, _, test in gathers([func.file]) if test is not None)
    bound = assigns(node.body, own_name(given) or "")
    for is_prefill in (True, False):
        env: dict[str, Value] = {
            "attention_mask": Grid("mask", num(P=1)),
            "input_ids": Grid("ids", num(P=1)) if is_prefill else Grid("other", num(1)),
            "kv_len": tensor(num(K=1)),
            "is_prefill": is_prefill,
        }
        flow = Flow(node, skip=gathered).run(env)
        doubt = from_zero(flow, at, given, bound) if is_prefill else as_counted(flow, at, given, bound)
        if doubt is not None:
            return doubt
    return None


def _stale_positions(node: ast.FunctionDef) -> list[ast.stmt] | ast.stmt:
    """Statements that only bind or change `position_ids`; the first one that does more."""
    out: list[ast.stmt] = []
    for s in statements(node.body):
        targets = s.targets if isinstance(s, ast.Assign) else [s.target] if isinstance(s, ast.AugAssign) else []
        if any(own_name(t) == "position_ids" for t in targets) and len(targets) == 1:
            out.append(s)
        elif any(isinstance(n, ast.Name) and n.id == "position_ids" for t in targets for n in ast.walk(t)):
            return s
        elif isinstance(s, ast.Expr) and _in_place(s.value):
            out.append(s)
    return out


def _changed_lengths(node: ast.FunctionDef) -> ast.stmt | None:
    """The first binding of `kv_len` that is neither zeros (prefill) nor the same value in another form."""
    for s in statements(node.body):
        targets = s.targets if isinstance(s, ast.Assign) else [s.target] if isinstance(s, ast.AugAssign) else []
        if not any(isinstance(n, ast.Name) and n.id == "kv_len" for t in targets for n in ast.walk(t)):
            continue
        value = getattr(s, "value", None)
        zeros = isinstance(value, ast.Call) and leaf(value.func) in ("zeros", "zeros_like")
        same = isinstance(value, ast.Name) or (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in ("to", "int", "long", "clone", "view", "contiguous")
            and own_name(value.func.value) == "kv_len"
        )
        if not isinstance(s, ast.Assign) or not (zeros or same):
            return s
    return None


def _in_place(node: ast.expr) -> bool:
    """`position_ids.masked_fill_(..)` and its like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and own_name(node.func.value) == "position_ids"
    )
