"""The functions between the model's entry and its attention: packed ids and hidden states [T, H].

In these functions the ids lose an axis ([B, S] -> [T]) and so do the hidden states ([B, S, H] -> [T, H]); positions
become one row [1, T], so that rotary and mask code that wants two axes keeps them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from kvskill.analyzer.modeling.dims import Dim, const
from kvskill.analyzer.modeling.facts import ModelFacts
from kvskill.analyzer.modeling.shapes import LAYOUT
from kvskill.analyzer.modeling.trace import chain
from kvskill.analyzer.modeling.values import Frame, Func, Instance, Tensor, Tup, Value
from kvskill.analyzer.modeling.walk import Walk
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import body_start, insert_before, names_read, replace_expr, whole_removal, wrap_expr
from kvskill.source import SourceFile

__all__ = ["Containers", "convert_containers", "find_containers", "picks_tokens"]

_PICKS = frozenset({"index_select", "gather", "getitem", "select", "narrow", "take_along_dim"})


class Containers:
    """The container functions and the frames that ran them."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.functions: dict[int, Func] = {}
        for frame in frames:
            if isinstance(frame.func, ast.FunctionDef):
                self.functions.setdefault(id(frame.func), Func(frame.func, frame.file, frame.owner))


def find_containers(facts: ModelFacts) -> Containers:
    """Frames above the attention objects, in both runs, and the helpers of the same objects that they call with ids
    or positions, or that pick tokens."""
    entries = {id(a.entry) for a in facts.attentions}
    frames: list[Frame] = []
    for run in (facts.prefill, facts.decode):
        if run is None:
            continue
        for frame in run.walk.frames:
            if id(frame.func) in entries and isinstance(frame.self_, Instance):
                for above in frame.chain()[1:]:
                    if above not in frames and id(above.func) not in entries:
                        frames.append(above)
    owners = {id(f.self_) for f in frames}
    helpers = {
        id(f.func)
        for run in (facts.prefill, facts.decode)
        if run is not None
        for f in run.walk.frames  # callers come before callees
        if f not in frames and f.parent is not None and id(f.self_) in owners and _helps(run.walk, f)
    }
    for run in (facts.prefill, facts.decode):
        for frame in run.walk.frames if run is not None else ():
            if id(frame.func) in helpers and frame.parent in frames and frame not in frames:
                frames.append(frame)
    return Containers(frames)


def _helps(walk: Walk, frame: Frame) -> bool:
    """Does the function take ids or positions as [B, S], or pick tokens of the hidden states?"""
    if not isinstance(frame.func, ast.FunctionDef) or not frame.func.body:
        return False
    given = frame.env_before.get(id(frame.func.body[0]), {}).values()
    if any(isinstance(v, Tensor) and _kind(v) in ("ids", "positions") and v.rank == 2 for v in given):
        return True
    return any(t.frame is frame and picks_tokens(t) for t in walk.tensors)


def picks_tokens(t: Tensor) -> bool:
    """Is it rows of the hidden states picked along the axes of requests and tokens?"""
    mixed = t.attrs.get("mixed") or ()
    return t.stream and t.op in _PICKS and any(a in ("B", "S") for dim in mixed for a in dim.atoms)


def convert_containers(ctx: Context, containers: Containers, after: dict[int, int]) -> None:
    """Edit shims, shape questions and positions. `after` maps a function to the line of its last-token selection:
    from there on hidden states have three axes again."""
    _positions_at_entry(ctx)
    for func in containers.functions.values():
        _convert(ctx, func, containers, after)


def _gone(ctx: Context, func: ast.FunctionDef) -> set[int]:
    """Ids of all nodes inside removed statements and dropped arguments."""
    out: set[int] = set()
    for stmt in whole_removal(func.body, ctx.removed.get(id(func), set())):
        out.update(id(n) for n in ast.walk(stmt))
    for node in ast.walk(func):
        if id(node) in ctx.dropped_args:
            out.update(id(n) for n in ast.walk(node))
    return out


def _positions_at_entry(ctx: Context) -> None:
    """Padded models get their positions as [B, S]: one row of T tokens stands for it."""
    facts = ctx.facts
    if facts.form != "padded-2d" or facts.prefill is None:
        return
    for found in {id(f[0]): f for r in facts.prefill.roots if (f := r.cls.method("forward")) is not None}.values():
        func, owner = found
        if "position_ids" not in [a.arg for a in func.args.args]:
            continue
        insert_before(
            ctx.edit_set(owner.file),
            body_start(func),
            "position_ids = position_ids.view(1, -1)  # packed [T] as one row\n",
            "positions as one row",
            ctx.unit(func, owner.file),
        )


def _convert(ctx: Context, func: Func, containers: Containers, after: dict[int, int]) -> None:
    node = func.node
    assert isinstance(node, ast.FunctionDef)
    gone = _gone(ctx, node)
    parents = {id(c): p for p in ast.walk(node) for c in ast.iter_child_nodes(p)}
    done: set[int] = set()
    for frame in containers.frames:
        if frame.func is not node:
            continue
        for part in ast.walk(node):
            value = frame.values.get(id(part))
            if id(part) in gone or id(part) in done or value is None:
                continue
            if isinstance(part, ast.expr) and isinstance(value, Tensor):
                if _shim(ctx, func.file, node, part, value, parents, frame):
                    done.update(id(n) for n in ast.walk(part))
                elif _side_operand(ctx, func.file, part, value, parents, frame):
                    done.add(id(part))
            elif isinstance(part, ast.expr) and _is_shape(part, value):
                limit = after.get(id(node))
                if limit is not None and part.lineno > limit and not _is_ids(value):
                    continue
                if not _is_ids(value) and _gives_shape(frame, node, part, value, parents):
                    done.add(id(part))
                    continue
                _shape(ctx, func.file, part, value, parents)
                done.add(id(part))
            elif isinstance(part, ast.Call) and _is_size(part, frame):
                limit = after.get(id(node))
                base = frame.values.get(id(part.func.value)) if isinstance(part.func, ast.Attribute) else None
                if limit is not None and part.lineno > limit and not (isinstance(base, Tensor) and _ids(base)):
                    continue
                _size(ctx, func.file, part)
                done.add(id(part))


def _kind(t: Tensor) -> str | None:
    """ids | positions | stream: what a tensor is on its way through the containers."""
    root = chain(t)[-1]
    if root.op == "input:input_ids":
        return "ids"
    if root.op == "input:position_ids":
        return "positions"
    return "stream" if t.stream else None


def _ids(t: Tensor) -> bool:
    return _kind(t) == "ids"


def _row_axes(t: Tensor) -> bool:
    """[B, S] or [1, B*S]: the shape that a shim gives."""
    if t.shape is None or len(t.shape) != 2:
        return False
    a, b = t.shape
    flat = Dim.atom("B") * Dim.atom("S")
    return a * b == flat or (a * b == Dim.atom("B") and b.value == 1) or (a.value == 1 and b == Dim.atom("B"))


def _shim(
    ctx: Context,
    file: SourceFile,
    func: ast.FunctionDef,
    part: ast.expr,
    value: Tensor,
    parents: dict[int, ast.AST],
    frame: Frame,
) -> bool:
    """`input_ids.view(bs, -1)` and the like: ids stay packed, positions become one row."""
    if _one_row(part, value):
        base = _base(part, frame)
        if base is None:
            return False
        _free_sizes(ctx, Func(func, file, frame.owner), part, base)
        replace_expr(ctx.edit_set(file), part, file.segment(base), "tokens are packed already")
        return True
    if ctx.facts.form != "packed-1d" or value.op not in LAYOUT | {"getitem"} or value.node is not part:
        return False
    kind = _kind(value)
    source = value.parents[0] if value.parents else None
    if not isinstance(source, Tensor):
        return False
    if kind == "stream":
        folded = source.rank == 2 and value.rank == 3 and value.shape is not None and source.shape is not None
        if not folded or value.shape is None or source.shape is None or value.shape[2] != source.shape[1]:
            return False
        if source.shape[0] != Dim.atom("B") * Dim.atom("S"):
            return False
    elif kind not in ("ids", "positions") or not _row_axes(value) or source.rank != 1:
        return False
    base = _base(part, frame)
    if base is None:
        return False
    text = file.segment(base)
    edits = ctx.edit_set(file)
    _free_sizes(ctx, Func(func, file, frame.owner), part, base)
    if kind == "positions":
        replace_expr(edits, part, f"{text}.view(1, -1)", "positions as one row")
        return True
    stmt = parents.get(id(part))
    same = (
        isinstance(stmt, ast.Assign)
        and len(stmt.targets) == 1
        and isinstance(stmt.targets[0], ast.Name)
        and isinstance(base, ast.Name)
        and stmt.targets[0].id == base.id
    )
    if same and isinstance(stmt, ast.Assign):
        ctx.mark_removed(Func(func, file, frame.owner), {stmt})
    else:
        replace_expr(edits, part, text, "ids stay packed")
    return True


def _one_row(part: ast.expr, value: Tensor) -> bool:
    """Hidden states [B, S, H] seen as [1, B * S, H]: what packed tokens are without it."""
    source = value.parents[0] if value.parents else None
    if not isinstance(source, Tensor) or value.node is not part or value.op not in ("view", "reshape"):
        return False
    if not (value.stream and source.shape and value.shape and len(source.shape) == len(value.shape) == 3):
        return False
    rows = source.shape[0] * source.shape[1]
    return source.shape[0] == Dim.atom("B") and value.shape == (const(1), rows, source.shape[2])


def _free_sizes(ctx: Context, func: Func, part: ast.expr, base: ast.expr) -> None:
    """The sizes that a shim asked for are read no more."""
    sizes = [a for a in part.args if a is not base] if isinstance(part, ast.Call) else []
    ctx.dropped_args.update(id(a) for a in sizes)
    ctx.functions.setdefault(id(func.node), func)
    ctx.freed.setdefault(id(func.node), set()).update(names_read(sizes))


def _base(part: ast.expr, frame: Frame) -> ast.expr | None:
    """What a rearranging expression rearranges: `x.view(..)`, `torch.reshape(x, ..)`, `x[None]`."""
    if isinstance(part, ast.Call):
        if isinstance(part.func, ast.Attribute) and isinstance(frame.values.get(id(part.func.value)), Tensor):
            return part.func.value
        return part.args[0] if part.args else None
    return part.value if isinstance(part, ast.Subscript) else None


def _side_operand(
    ctx: Context, file: SourceFile, part: ast.expr, value: Tensor, parents: dict[int, ast.AST], frame: Frame
) -> bool:
    """A [B, S, X] tensor that is not hidden states, added to or multiplied with them: its row axis goes."""
    owner = parents.get(id(part))
    if value.stream or value.rank != 3 or not isinstance(owner, ast.BinOp) or value.shape is None:
        return False
    other = owner.left if owner.right is part else owner.right
    peer = frame.values.get(id(other))
    if not (isinstance(peer, Tensor) and peer.stream and peer.rank == 3):
        return False
    if value.shape[0] == const(1) and value.shape[1] == const(1):
        return False
    wrap_expr(ctx.edit_set(file), part, "", ".squeeze(0)", "row axis dropped")
    return True


def _is_shape(part: ast.expr, value: Value) -> bool:
    if not (isinstance(part, ast.Attribute) and part.attr == "shape" and isinstance(value, Tup)):
        return False
    return value.shape_of is not None and _loses_axis(value.shape_of)


def _is_ids(value: Value) -> bool:
    return isinstance(value, Tup) and value.shape_of is not None and _ids(value.shape_of)


def _loses_axis(t: Tensor) -> bool:
    kind = _kind(t)
    if kind == "ids":
        return t.rank == 2 and _row_axes(t)
    return kind == "stream" and t.rank == 3


_TAKES_SHAPE = frozenset({"view", "reshape", "expand", "new_empty", "new_zeros", "new_ones", "empty", "zeros", "ones"})


def _gives_shape(
    frame: Frame, func: ast.FunctionDef, part: ast.expr, value: Value, parents: dict[int, ast.AST]
) -> bool:
    """Is the whole shape only given on (`y.view(x.shape)`)? Then it follows the hidden states, which lose the axis."""
    uses: list[ast.AST] = [part]
    owner = parents.get(id(part))
    if isinstance(owner, ast.Assign) and owner.value is part:
        if not all(isinstance(t, ast.Name) for t in owner.targets):
            return False
        uses = [
            n
            for n in ast.walk(func)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and frame.values.get(id(n)) is value
        ]
    return bool(uses) and all(_shape_argument(use, parents) for use in uses)


def _shape_argument(node: ast.AST, parents: dict[int, ast.AST]) -> bool:
    owner = parents.get(id(node))
    if isinstance(owner, ast.Starred):
        node, owner = owner, parents.get(id(owner))
    if not (isinstance(owner, ast.Call) and len(owner.args) == 1 and owner.args[0] is node):
        return False
    name = owner.func.attr if isinstance(owner.func, ast.Attribute) else ""
    return name in _TAKES_SHAPE


def _shape(ctx: Context, file: SourceFile, part: ast.expr, value: Value, parents: dict[int, ast.AST]) -> None:
    assert isinstance(value, Tup) and value.shape_of is not None
    edits = ctx.edit_set(file)
    owner = parents.get(id(part))
    text = file.segment(part)
    rank = len(value.items)
    if isinstance(owner, ast.Subscript) and owner.value is part:
        index = _int(owner.slice)
        if index is not None:
            _axis(_replacer(ctx, file), owner, text, index, rank, "[{}]")
            return
    del edits, text
    wrap_expr(ctx.edit_set(file), part, "(1, *", ")", "packed tokens as one row")


def _replacer(ctx: Context, file: SourceFile) -> Callable[[ast.AST, str], None]:
    edits = ctx.edit_set(file)
    return lambda node, text: replace_expr(edits, node, text, "packed tokens as one row")


def _axis(replace: Callable[[ast.AST, str], None], node: ast.expr, text: str, index: int, rank: int, form: str) -> None:
    if index in (0, -rank):
        replace(node, "1")
    elif index > 0:
        replace(node, text + form.format(index - 1))


def _int(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int) else None
    return None


def _is_size(part: ast.Call, frame: Frame) -> bool:
    func = part.func
    if not (isinstance(func, ast.Attribute) and func.attr == "size"):
        return False
    base = frame.values.get(id(func.value))
    return isinstance(base, Tensor) and _loses_axis(base)


def _size(ctx: Context, file: SourceFile, part: ast.Call) -> None:
    assert isinstance(part.func, ast.Attribute)
    text = file.segment(part.func.value)
    replace = _replacer(ctx, file)
    if not part.args:
        replace(part, f"(1, *{text}.shape)")
        return
    index = _int(part.args[0])
    if index is not None:
        _axis(replace, part, f"{text}.size", index, 3, "({})")
