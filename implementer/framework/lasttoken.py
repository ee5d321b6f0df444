"""Which token goes to the language-model head: the Legacy choice is replaced by one row per request."""

from __future__ import annotations

import ast

from kvskill.analyzer.modeling.trace import ancestors, chain, stmt_in
from kvskill.analyzer.modeling.values import Const, Frame, Func, Tensor
from kvskill.implementer.framework.container import Containers, picks_tokens
from kvskill.implementer.framework.context import Context
from kvskill.implementer.framework.threading import thread_metadata
from kvskill.implementer.render import render
from kvskill.implementer.textops import insert_after, insert_before, names_read, replace_expr, statements

__all__ = ["convert_last_token"]


def convert_last_token(ctx: Context, containers: Containers) -> dict[int, int]:
    """Replace the selection; returns {function: line from which hidden states have three axes again}."""
    run = ctx.facts.prefill
    assert run is not None
    frames = [f for f in containers.frames if f in run.walk.frames]
    picks = [t for t in run.walk.tensors if picks_tokens(t) and t.frame in frames and not _inside_attention(ctx, t)]
    if picks and all(_already_packed(t) for t in picks):
        return {}
    early = next((t for t in picks if _fixed_place(t)), None)
    if early is not None and early.node is not None and early.frame is not None:
        ctx.refuse(
            early.frame.file,
            early.node,
            "KV210",
            "The head gets other tokens than the last one of each prompt.",
            "Pick the last token of each prompt.",
        )
        return {}
    after: dict[int, int] = {}
    for root in run.roots:  # the drafting model has a head too
        mine = [f for f in frames if f.chain()[-1].self_ is root]
        here = [t for t in picks if t.frame in mine]
        if not here:
            after |= _add(ctx, mine)
        for func in {id(t.frame.func): t for t in here if t.frame is not None}:
            group = [t for t in here if t.frame is not None and id(t.frame.func) == func]
            frame = group[0].frame
            assert frame is not None
            if func not in after:
                after |= _replace(ctx, frame, [t for t in group if t.frame is frame])
            else:
                thread_metadata(ctx, frame, group[0].stmt)
    return after


def _already_packed(t: Tensor) -> bool:
    """Rows of [T, H] picked by the running sum of lengths: that is the packed selection already."""
    source = t.parents[0]
    if not isinstance(source, Tensor) or source.rank != 2 or t.rank != 2 or chain(source)[-1].rank != 2:
        return False
    return any(a.op == "input:actual_seq_lengths_cu_q" for a in ancestors(t.parents[1:]))


def _fixed_place(t: Tensor) -> bool:
    """Is it a pick at a constant place other than the end (`x[:, 0]`, `x[:, :1]`), or of several last tokens?"""
    if t.op == "getitem":
        parts = t.attrs.get("parts") or []
        token = parts[1] if len(parts) > 1 else None
        if isinstance(token, Const):
            return isinstance(token.value, int) and token.value != -1
        if isinstance(token, slice):
            start = getattr(token.start, "value", None) if token.start is not None else 0
            stop = getattr(token.stop, "value", None) if token.stop is not None else None
            several = isinstance(start, int) and start < -1 and stop is None
            return several or (start == 0 and isinstance(stop, int) and stop > 0)
    return False


def _inside_attention(ctx: Context, t: Tensor) -> bool:
    entries = {id(a.entry) for a in ctx.facts.attentions}
    return t.frame is not None and any(id(f.func) in entries for f in t.frame.chain())


def _replace(ctx: Context, frame: Frame, picks: list[Tensor]) -> dict[int, int]:
    func = frame.func
    assert isinstance(func, ast.FunctionDef)
    first = stmt_in(frame, picks[0].frame, picks[0].stmt)
    top = next((s for s in func.body if first is s or first in list(statements([s]))), None)
    if top is None or first is None:
        return {}
    env = frame.env_before[id(top)]
    sources = [
        name for name in _ordered_reads(top) if isinstance(v := env.get(name), Tensor) and v.stream and v.rank == 3
    ]
    targets = [
        n.id
        for s in statements([top])
        for t in _targets(s)
        for n in ast.walk(t)
        if isinstance(n, ast.Name) and isinstance(v := frame.values.get(id(n)), Tensor) and v.stream
    ]
    if sources and (not targets or _more_than_a_pick(frame, top, picks)):
        return _replace_inline(ctx, frame, picks, top)
    if not sources or not targets:
        ctx.refuse(
            frame.file,
            top,
            "KV210",
            "How the last token is picked is not understood.",
            "Pick it in a statement of its own.",
        )
        return {}
    source, target = sources[0], targets[-1]
    meta = thread_metadata(ctx, frame, top)
    if meta is None:
        ctx.refuse(frame.file, top, "KV211", "The forward metadata does not reach this function.", "Pass it on.")
        return {}
    text = render("framework/last_token", name=target, meta=meta)
    if source != target:
        text = f"{target} = {source}\n{text}"
    index = func.body.index(top)
    binder = None
    for stmt in func.body[:index]:
        if any(
            isinstance(n, ast.Name) and n.id == source
            for inner in statements([stmt])
            for t in _targets(inner)
            for n in ast.walk(t)
        ):
            binder = stmt
    unit = ctx.unit(func, frame.file)
    edits = ctx.edit_set(frame.file)
    removed = {top}
    asked = _asks_shape(frame, func, source, binder, top) if source == target else None
    for stmt in func.body[index + 1 :]:  # rearrangements of the picked token that follow
        value = stmt.value if isinstance(stmt, ast.Assign) else None
        if value is None or names_read([value]) & {target} == set() or not _reshapes(frame, stmt, target):
            break
        removed.add(stmt)
    if asked is not None:  # the sizes that follow are those of the picked tokens
        insert_before(edits, asked, text, "one row per request for the head", unit)
        line = asked.lineno - 1
    elif (
        binder is not None
        and source == target
        and source not in names_read(func.body[func.body.index(binder) + 1 : index])
    ):
        insert_after(edits, binder, text, "one row per request for the head", unit)
        line = binder.end_lineno or binder.lineno
    else:
        insert_before(edits, top, text, "one row per request for the head", unit)
        line = top.lineno - 1
    ctx.use(func, {target, source, meta.split("[")[0]})
    ctx.bound_at.setdefault(id(func), []).append((line, {target}))
    ctx.mark_removed(Func(func, frame.file, frame.owner), removed)
    return {id(func): line}


def _asks_shape(
    frame: Frame, func: ast.FunctionDef, source: str, binder: ast.stmt | None, top: ast.stmt
) -> ast.stmt | None:
    """The first statement that asks the sizes of `source` between its binding and the selection; None when there is
    none, or when something there reads the hidden states themselves."""
    first = None
    for stmt in func.body[func.body.index(binder) + 1 if binder is not None else 0 : func.body.index(top)]:
        uses = [n for n in ast.walk(stmt) if isinstance(n, ast.Name) and n.id == source]
        asked = {
            n.value: n.attr for n in ast.walk(stmt) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        }
        if any(asked.get(u) not in ("shape", "size", "device", "dtype") for u in uses):
            return None
        if first is None and any(asked[u] in ("shape", "size") for u in uses):
            first = stmt
    return first


def _more_than_a_pick(frame: Frame, top: ast.stmt, picks: list[Tensor]) -> bool:
    """`logits = self.lm_head(x[:, -1:])`: the statement goes on to compute with what it picked."""
    if not isinstance(top, (ast.Assign, ast.AnnAssign)) or top.value is None:
        return False
    value = frame.values.get(id(top.value))
    return isinstance(value, Tensor) and not any(t in picks for t in chain(value))


def _replace_inline(ctx: Context, frame: Frame, picks: list[Tensor], top: ast.stmt) -> dict[int, int]:
    """`self.lm_head(hidden_states[:, -1:])`: the selection moves before the statement."""
    func, pick = frame.func, picks[0]
    assert isinstance(func, ast.FunctionDef)
    node = pick.node
    base = node.value if isinstance(node, ast.Subscript) else None
    meta = thread_metadata(ctx, frame, top)
    if len(picks) != 1 or not isinstance(base, ast.Name) or meta is None or not isinstance(node, ast.Subscript):
        ctx.refuse(
            frame.file,
            top,
            "KV210",
            "How the last token is picked is not understood.",
            "Pick it in a statement of its own.",
        )
        return {}
    text = render("framework/last_token", name=base.id, meta=meta)
    edits = ctx.edit_set(frame.file)
    insert_before(edits, top, text, "one row per request for the head", ctx.unit(func, frame.file))
    dropped = (
        isinstance(pick.parents[0], Tensor) and pick.rank is not None and pick.rank == (pick.parents[0].rank or 0) - 1
    )
    replace_expr(edits, node, f"{base.id}[:, -1]" if dropped else base.id, "picked above")
    ctx.use(func, {base.id, meta.split("[")[0]})
    return {id(func): top.lineno - 1}


def _ordered_reads(stmt: ast.stmt) -> list[str]:
    return [n.id for n in ast.walk(stmt) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]


def _targets(stmt: ast.stmt) -> list[ast.expr]:
    if isinstance(stmt, ast.Assign):
        return stmt.targets
    return [stmt.target] if isinstance(stmt, (ast.AnnAssign, ast.AugAssign)) else []


def _reshapes(frame: Frame, stmt: ast.Assign | ast.stmt, name: str) -> bool:
    """Is the statement `name = <rearrangement of name>`?"""
    if not isinstance(stmt, ast.Assign) or len(stmt.targets) != 1 or not isinstance(stmt.targets[0], ast.Name):
        return False
    if stmt.targets[0].id != name:
        return False
    value = frame.values.get(id(stmt.value))
    return isinstance(value, Tensor) and value.op in ("view", "reshape", "squeeze", "unsqueeze")


def _add(ctx: Context, frames: list[Frame]) -> dict[int, int]:
    """No selection: add one before the head."""
    root = next((f for f in frames if f.parent is None), None)
    if root is None or not isinstance(root.func, ast.FunctionDef):
        return {}
    func = root.func
    head = None
    for stmt in statements(func.body):
        if id(stmt) not in root.env_before or not isinstance(stmt, (ast.Assign, ast.Return, ast.AnnAssign)):
            continue
        for node in ast.walk(stmt):
            value = root.values.get(id(node)) if isinstance(node, ast.Call) else None
            linear = isinstance(value, Tensor) and value.stream and value.op in ("linear", "matmul", "module")
            if linear and isinstance(node, ast.Call) and isinstance(value, Tensor) and value.frame is root:
                head = (stmt, node)
                break
        if head is not None:
            break
    if head is None:
        ctx.refuse(root.file, func, "KV212", "The call of the language-model head was not found.", "Call it here.")
        return {}
    stmt, call = head
    names = [
        a.id
        for a in [*call.args, *[k.value for k in call.keywords]]
        if isinstance(a, ast.Name) and isinstance(v := root.values.get(id(a)), Tensor) and v.stream
    ]
    meta = thread_metadata(ctx, root, stmt)
    if not names or meta is None:
        ctx.refuse(
            root.file,
            stmt,
            "KV212",
            "The head's input has no name here.",
            "Give the hidden states a name before the head.",
        )
        return {}
    text = render("framework/last_token", name=names[0], meta=meta)
    insert_before(ctx.edit_set(root.file), stmt, text, "one row per request for the head", ctx.unit(func, root.file))
    ctx.use(func, {names[0], meta.split("[")[0]})
    return {id(func): stmt.lineno - 1}
