"""Shape rules of tensor methods and torch functions, one small function per rule.

Each rule takes the walk, the node, the tensor and its arguments and returns a value. Rules never guess: what they
do not know becomes a tensor without a shape. Impossible shapes (wrong rank, sizes that do not divide) are
reported to the walk as problems.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvskill.analyzer.modeling.dims import Dim, const, fresh, product
from kvskill.analyzer.modeling.values import Const, Scalar, Tensor, Tup, Unknown, Value

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.walk import Walk

__all__ = ["ELEMENTWISE", "LAYOUT", "METHODS", "MIXING", "broadcast", "getitem", "matmul_shape"]

Rule = Callable[["Walk", ast.AST, Tensor, list[Value], dict[str, Value]], Value]

# value-preserving rearrangements: what may stand between the fresh K/V and their use
LAYOUT = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "flatten",
        "unflatten",
        "movedim",
        "swapaxes",
        "expand",
        "expand_as",
        "clone",
        "detach",
        "view_as",
        "to",
        "type",
        "float",
        "bfloat16",
        "half",
        "type_as",
        "cpu",
        "npu",
        "cuda",
    ]
)
# keep the shape, act on each element
ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "add_",
        "sub",
        "mul",
        "mul_",
        "div",
        "div_",
        "pow",
        "neg",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "square",
        "sigmoid",
        "tanh",
        "silu",
        "relu",
        "gelu",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_max",
        "cos",
        "sin",
        "to",
        "float",
        "half",
        "bfloat16",
        "long",
        "int",
        "bool",
        "type",
        "type_as",
        "double",
        "contiguous",
        "clone",
        "detach",
        "cpu",
        "npu",
        "cuda",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "round",
        "floor",
        "ceil",
        "sign",
        "logical_not",
        "bitwise_not",
        "isnan",
        "softplus",
        "requires_grad_",
        "copy_",
        "fill_",
        "zero_",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "reciprocal",
        "erf",
        "sub_",
        "nan_to_num",
        "remainder",
        "where_",
        "requires_grad",
        "dequantize",
        "tril",
        "triu",
        "tril_",
        "triu_",
    ]
)
# combine elements along an axis
MIXING = frozenset(
    [
        "softmax",
        "log_softmax",
        "cumsum",
        "cumprod",
        "mean",
        "sum",
        "max",
        "min",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "sort",
        "argsort",
        "topk",
        "norm",
        "var",
        "std",
        "flip",
        "roll",
        "any",
        "all",
        "prod",
        "logsumexp",
        "median",
        "count_nonzero",
        "diff",
    ]
)
_KEEP_AXIS = frozenset(["softmax", "log_softmax", "cumsum", "cumprod", "flip", "roll", "sort", "argsort"])


def _int(value: Value | None) -> int | None:
    if isinstance(value, Const) and isinstance(value.value, int) and not isinstance(value.value, bool):
        return value.value
    if isinstance(value, Scalar) and value.dim is not None:
        return value.dim.value
    return None


def _axis(walk: Walk, node: ast.AST, t: Tensor, value: Value | None, extra: int = 0) -> int | None:
    axis = _int(value)
    if axis is None or t.shape is None:
        return None
    rank = len(t.shape) + extra
    if not -rank <= axis < rank:
        walk.problem(node, "rank", f"dim {axis} of a tensor with {len(t.shape)} axes")
        return None
    return axis % rank


def _sizes(walk: Walk, args: list[Value]) -> list[Dim | None] | None:
    """The dims of a size argument list; None entries stand for -1."""
    if len(args) == 1 and isinstance(args[0], Tup):
        args = args[0].items
    out: list[Dim | None] = []
    for arg in args:
        dim = walk.as_dim(arg)
        if dim is not None and dim.value == -1:
            out.append(None)
        else:
            out.append(dim if dim is not None else fresh())
    return out


def _known(t: Tensor) -> bool:
    return t.shape is not None


def view(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    if "size" in kw:
        args = [kw["size"]]
    if "shape" in kw:
        args = [kw["shape"]]
    if args and isinstance(args[0], Const) and not isinstance(args[0].value, int):  # view(dtype)
        return walk.tensor("view", [t], t.shape, node)
    if len(args) == 1 and isinstance(args[0], Unknown):
        return walk.tensor("view", [t], None, node)
    sizes = _sizes(walk, args)
    if sizes is None:
        return walk.tensor("view", [t], None, node)
    shape: list[Dim] = []
    holes = [i for i, d in enumerate(sizes) if d is None]
    walk.learn_batch(t, sizes)
    sizes = [walk.known_dim(d) if d is not None else None for d in sizes]
    for d in sizes:
        shape.append(d if d is not None else fresh())
    if t.shape is not None:
        total = product(t.shape)
        rest = product([d for d in sizes if d is not None])
        if len(holes) == 1:
            if not (total.wild or rest.wild):
                ct, cr = walk.concrete_dim(total), walk.concrete_dim(rest)
                if ct is not None and cr and ct % cr:
                    walk.problem(node, "view", f"{total} elements do not divide by {rest}")
                else:
                    shape[holes[0]] = walk.quotient(total, rest)
        elif not holes and not walk.equal_dims(total, rest):
            walk.problem(node, "view", f"{total} elements viewed as {rest}")
    return walk.tensor("view", [t], tuple(shape), node)


def transpose(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    a = _axis(walk, node, t, args[0] if args else kw.get("dim0"))
    b = _axis(walk, node, t, args[1] if len(args) > 1 else kw.get("dim1"))
    if t.shape is None or a is None or b is None:
        return walk.tensor("transpose", [t], None, node)
    shape = list(t.shape)
    shape[a], shape[b] = shape[b], shape[a]
    return walk.tensor("transpose", [t], tuple(shape), node, perm=(a, b))


def permute(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    items = args[0].items if len(args) == 1 and isinstance(args[0], Tup) else args
    axes = [_int(a) for a in items]
    if t.shape is None or any(a is None for a in axes):
        return walk.tensor("permute", [t], None, node)
    if len(axes) != len(t.shape):
        walk.problem(node, "rank", f"permute of {len(axes)} axes on a tensor with {len(t.shape)}")
        return walk.tensor("permute", [t], None, node)
    order = tuple(a % len(axes) for a in axes if a is not None)
    return walk.tensor("permute", [t], tuple(t.shape[a] for a in order), node, perm=order)


def movedim(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    given = [args[0] if args else kw.get("source"), args[1] if len(args) > 1 else kw.get("destination")]
    moves = [[_int(i) for i in (g.items if isinstance(g, Tup) else [g] if g is not None else [])] for g in given]
    if t.shape is None or any(i is None for m in moves for i in m) or len(moves[0]) != len(moves[1]):
        return walk.tensor("movedim", [t], None, node)
    rank = len(t.shape)
    if any(not -rank <= i < rank for m in moves for i in m if i is not None):
        walk.problem(node, "rank", f"movedim on a tensor with {rank} axes")
        return walk.tensor("movedim", [t], None, node)
    source, target = ([i % rank for i in m if i is not None] for m in moves)
    order = [-1] * rank
    for a, b in zip(source, target, strict=True):
        order[b] = a
    left = iter(i for i in range(rank) if i not in source)
    order = [i if i >= 0 else next(left) for i in order]
    return walk.tensor("movedim", [t], tuple(t.shape[i] for i in order), node, perm=tuple(order))


def like_other(name: str) -> Rule:
    """`view_as` and the like: the shape of the other tensor."""

    def rule(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
        other = args[0] if args else kw.get("other")
        return walk.tensor(name, [t], other.shape if isinstance(other, Tensor) else None, node)

    return rule


def unsqueeze(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"), extra=1)
    if t.shape is None or axis is None:
        return walk.tensor("unsqueeze", [t], None, node)
    return walk.tensor("unsqueeze", [t], (*t.shape[:axis], const(1), *t.shape[axis:]), node)


def squeeze(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    if t.shape is None:
        return walk.tensor("squeeze", [t], None, node)
    if not args and "dim" not in kw:
        return walk.tensor("squeeze", [t], tuple(d for d in t.shape if d.value != 1), node, blind=True)
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"))
    if axis is None:
        return walk.tensor("squeeze", [t], None, node)
    shape = t.shape if t.shape[axis].value != 1 else (*t.shape[:axis], *t.shape[axis + 1 :])
    return walk.tensor("squeeze", [t], shape, node)


def flatten(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    start = _axis(walk, node, t, args[0] if args else kw.get("start_dim", Const(0)))
    end = _axis(walk, node, t, args[1] if len(args) > 1 else kw.get("end_dim", Const(-1)))
    if t.shape is None or start is None or end is None:
        return walk.tensor("flatten", [t], None, node)
    shape = (*t.shape[:start], product(t.shape[start : end + 1]), *t.shape[end + 1 :])
    return walk.tensor("flatten", [t], shape, node)


def unflatten(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"))
    sizes = args[1] if len(args) > 1 else kw.get("sizes")
    if t.shape is None or axis is None or not isinstance(sizes, Tup):
        return walk.tensor("unflatten", [t], None, node)
    part = walk.tensor("view", [t], (t.shape[axis],), node)
    inner = view(walk, node, part, [sizes], {})
    assert isinstance(inner, Tensor) and inner.shape is not None
    return walk.tensor("unflatten", [t], (*t.shape[:axis], *inner.shape, *t.shape[axis + 1 :]), node)


def expand(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    sizes = _sizes(walk, args)
    if t.shape is None or sizes is None:
        return walk.tensor("expand", [t], None, node)
    if len(sizes) < len(t.shape):
        walk.problem(node, "rank", f"expand to {len(sizes)} axes of a tensor with {len(t.shape)}")
        return walk.tensor("expand", [t], None, node)
    lead = len(sizes) - len(t.shape)
    shape = []
    for i, d in enumerate(sizes):
        own = t.shape[i - lead] if i >= lead else None
        shape.append(own if d is None and own is not None else (d if d is not None else fresh()))
    return walk.tensor("expand", [t], tuple(shape), node)


def repeat(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    sizes = _sizes(walk, args)
    if t.shape is None or sizes is None or any(s is None for s in sizes):
        return walk.tensor("repeat", [t], None, node)
    lead = len(sizes) - len(t.shape)
    if lead < 0:
        walk.problem(node, "rank", f"repeat of {len(sizes)} axes on a tensor with {len(t.shape)}")
        return walk.tensor("repeat", [t], None, node)
    own = [const(1)] * lead + list(t.shape)
    return walk.tensor("repeat", [t], tuple(o * s for o, s in zip(own, sizes, strict=True) if s), node)


def repeat_interleave(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    dim_arg = args[1] if len(args) > 1 else kw.get("dim")
    times = walk.as_dim(args[0] if args else kw.get("repeats"))
    axis = _axis(walk, node, t, dim_arg)
    if t.shape is None or axis is None or times is None:
        return walk.tensor("repeat_interleave", [t], None, node)
    shape = list(t.shape)
    shape[axis] = shape[axis] * times
    return walk.tensor("repeat_interleave", [t], tuple(shape), node, axis=axis)


def split(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    sizes = args[0] if args else kw.get("split_size_or_sections") or kw.get("split_size")
    dim_arg = args[1] if len(args) > 1 else kw.get("dim", Const(0))
    axis = _axis(walk, node, t, dim_arg)
    if not isinstance(sizes, Tup):
        size = walk.as_dim(sizes)
        if sizes is None or size is None or t.shape is None or axis is None:
            return Unknown("split by one size", (t,))
        parts = t.shape[axis].divide(size)
        count = walk.concrete_dim(parts) if parts is not None else None
        if count is None:
            whole, one = walk.concrete_dim(t.shape[axis]), walk.concrete_dim(size)
            count = whole // one if whole is not None and one and whole % one == 0 else None
        if count is None or not 0 < count <= 64:
            return Unknown("split by one size", (t,))
        sizes = Tup([sizes] * count)
    out: list[Value] = []
    for i, item in enumerate(sizes.items):
        dim = walk.as_dim(item) or fresh()
        shape = None
        if t.shape is not None and axis is not None:
            shape = (*t.shape[:axis], dim, *t.shape[axis + 1 :])
        out.append(walk.tensor("split", [t], shape, node, part=i, axis=axis))
    return Tup(out)


def chunk(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    n = _int(args[0] if args else kw.get("chunks"))
    axis = _axis(walk, node, t, args[1] if len(args) > 1 else kw.get("dim", Const(0)))
    if n is None:
        return Unknown("chunk by an unknown count", (t,))
    shape = None
    if t.shape is not None and axis is not None:
        part = walk.quotient(t.shape[axis], const(n))
        shape = (*t.shape[:axis], part, *t.shape[axis + 1 :])
    return Tup([walk.tensor("split", [t], shape, node, part=i, axis=axis) for i in range(n)])


def unbind(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim", Const(0)))
    if t.shape is None or axis is None or t.shape[axis].value is None:
        return Unknown("unbind of an unknown axis", (t,))
    shape = (*t.shape[:axis], *t.shape[axis + 1 :])
    return Tup([walk.tensor("select", [t], shape, node, axis=axis, index=i) for i in range(t.shape[axis].value or 0)])


def mixing(name: str) -> Rule:
    def rule(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
        pos = 1 if name in ("topk", "norm", "roll") else 0
        dim_arg = args[pos] if len(args) > pos else kw.get("dim", kw.get("dims"))
        axis = _axis(walk, node, t, dim_arg) if dim_arg is not None else None
        if name == "topk" and dim_arg is None and t.shape is not None:
            axis = len(t.shape) - 1
        keep_arg = args[pos + 1] if len(args) > pos + 1 else kw.get("keepdim")
        keep = isinstance(keep_arg, Const) and keep_arg.value is True
        shape = None
        mixed: tuple[Dim, ...] | None = None
        if t.shape is not None:
            if axis is not None:
                mixed = (t.shape[axis],)
                if name in _KEEP_AXIS:
                    shape = t.shape
                elif name == "topk":
                    k = walk.as_dim(args[0] if args else kw.get("k")) or fresh()
                    shape = (*t.shape[:axis], k, *t.shape[axis + 1 :])
                else:
                    mid = (const(1),) if keep else ()
                    shape = (*t.shape[:axis], *mid, *t.shape[axis + 1 :])
            elif dim_arg is None:
                mixed, shape = t.shape, ()
        node_value = walk.tensor(name, [t], shape, node, mixed=mixed)
        two = name in ("topk", "sort") or (name in ("max", "min", "median") and dim_arg is not None)
        if two:
            return Tup([node_value, walk.tensor(name, [t], shape, node, mixed=mixed)])
        return node_value

    return rule


def index_select(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"))
    index = args[1] if len(args) > 1 else kw.get("index")
    parents = [t, *([index] if index is not None else [])]
    if t.shape is None or axis is None:
        return walk.tensor("index_select", parents, None, node)
    rows = index.shape[0] if isinstance(index, Tensor) and index.shape and len(index.shape) == 1 else fresh()
    shape = (*t.shape[:axis], rows, *t.shape[axis + 1 :])
    return walk.tensor("index_select", parents, shape, node, axis=axis, mixed=(t.shape[axis],))


def narrow(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"))
    length = walk.as_dim(args[2] if len(args) > 2 else kw.get("length"))
    if t.shape is None or axis is None:
        return walk.tensor("narrow", [t], None, node)
    shape = (*t.shape[:axis], length if length is not None else fresh(), *t.shape[axis + 1 :])
    return walk.tensor("narrow", [t], shape, node, axis=axis, mixed=(t.shape[axis],))


def select(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"))
    if t.shape is None or axis is None:
        return walk.tensor("select", [t], None, node)
    shape = (*t.shape[:axis], *t.shape[axis + 1 :])
    return walk.tensor("select", [t], shape, node, axis=axis, mixed=(t.shape[axis],))


def gather(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    axis = _axis(walk, node, t, args[0] if args else kw.get("dim"))
    index = args[1] if len(args) > 1 else kw.get("index")
    shape = index.shape if isinstance(index, Tensor) else None
    mixed = (t.shape[axis],) if t.shape is not None and axis is not None else None
    parents = [t, *([index] if index is not None else [])]
    return walk.tensor("gather", parents, shape, node, axis=axis, mixed=mixed)


def same_shape(name: str) -> Rule:
    def rule(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
        shape = t.shape
        others = [a for a in args if isinstance(a, Tensor)]
        for other in others:
            if name not in ("to", "type_as", "copy_"):
                shape = broadcast(walk, node, shape, other.shape)
        return walk.tensor(name, [t, *args, *kw.values()], shape, node)

    return rule


def broadcast(
    walk: Walk, node: ast.AST, a: tuple[Dim, ...] | None, b: tuple[Dim, ...] | None
) -> tuple[Dim, ...] | None:
    """The broadcast shape; axes that cannot match are a problem.

    An operand of unknown shape is taken to broadcast into the known one (a table, a scale, a bias); the numeric
    verification is what would show it if it does not.
    """
    if a is None or b is None:
        return a if b is None else b
    out: list[Dim] = []
    for i in range(1, max(len(a), len(b)) + 1):
        x = a[-i] if i <= len(a) else const(1)
        y = b[-i] if i <= len(b) else const(1)
        if x.value == 1:
            out.append(y)
        elif y.value == 1 or x == y or y.wild:
            out.append(x)
        elif x.wild:
            out.append(y)
        elif walk.equal_dims(x, y):
            out.append(x)
        else:
            walk.problem(node, "broadcast", f"axes {x} and {y} do not match")
            out.append(x)
    return tuple(reversed(out))


def matmul_shape(
    walk: Walk, node: ast.AST, a: tuple[Dim, ...] | None, b: tuple[Dim, ...] | None
) -> tuple[Dim, ...] | None:
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if not walk.equal_dims(a[-1], b[-2]):
        walk.problem(node, "matmul", f"inner axes {a[-1]} and {b[-2]} do not match")
    lead = broadcast(walk, node, a[:-2], b[:-2])
    return None if lead is None else (*lead, a[-2], b[-1])


def getitem(walk: Walk, node: ast.AST, t: Tensor, index: Value, parts: list[Value | slice]) -> Value:
    """`t[...]` with integers, slices, None, Ellipsis and tensors."""
    if t.shape is None:
        return walk.tensor("getitem", [t], None, node, parts=parts)
    used = sum(1 for p in parts if not (isinstance(p, Const) and p.value in (None, ...)))
    if used > len(t.shape):
        walk.problem(node, "rank", f"{used} indices on a tensor with {len(t.shape)} axes")
        return walk.tensor("getitem", [t], None, node, parts=parts)
    shape: list[Dim] = []
    parents: list[Value] = [t]
    mixed: list[Dim] = []
    axis = 0
    advanced: list[tuple[Dim, ...]] = []
    adv_at = 0
    for part in parts:
        if isinstance(part, Const) and part.value is ...:
            rest = len(t.shape) - used
            for _ in range(rest):
                shape.append(t.shape[axis])
                axis += 1
        elif isinstance(part, Const) and part.value is None:
            shape.append(const(1))
        elif isinstance(part, slice):
            dim = t.shape[axis]
            if part.start is None and part.stop is None and part.step is None:
                shape.append(dim)
            else:
                shape.append(_sliced(walk, dim, part))
                mixed.append(dim)
            axis += 1
        elif isinstance(part, Tensor):
            parents.append(part)
            mixed.append(t.shape[axis])
            if part.shape is None:
                return walk.tensor("getitem", [t, part], None, node, parts=parts)
            if not advanced:
                adv_at = len(shape)
            advanced.append(part.shape)
            axis += 1
        elif isinstance(part, Tup) and part.items and all(_int(i) is not None for i in part.items):
            mixed.append(t.shape[axis])
            shape.append(const(len(part.items)))
            axis += 1
        elif isinstance(part, Tup) or _is_unknown(part):
            return walk.tensor("getitem", [t, part] if isinstance(part, Value) else [t], None, node, parts=parts)
        else:
            mixed.append(t.shape[axis])
            axis += 1
    shape.extend(t.shape[axis:])
    if advanced:
        lead: tuple[Dim, ...] | None = advanced[0]
        for other in advanced[1:]:
            lead = broadcast(walk, node, lead, other)
        if lead is not None:
            shape[adv_at:adv_at] = list(lead)
    op = "view" if _only_unit_axes(t, parts) else "getitem"
    return walk.tensor(op, parents, tuple(shape), node, parts=parts, mixed=tuple(mixed) or None)


def _only_unit_axes(t: Tensor, parts: list[Value | slice]) -> bool:
    """Does the index only insert axes and drop axes of size one?"""
    assert t.shape is not None
    axis = 0
    for part in parts:
        if isinstance(part, slice):
            if not (part.start is None and part.stop is None and part.step is None):
                return False
            axis += 1
        elif isinstance(part, Const) and part.value is None:
            continue
        elif _int(part) in (0, -1) and axis < len(t.shape) and t.shape[axis].value == 1:
            axis += 1
        else:
            return False
    return True


def _is_unknown(part: object) -> bool:
    return isinstance(part, Unknown)


def _sliced(walk: Walk, dim: Dim, part: slice) -> Dim:
    start = walk.as_dim(part.start) if part.start is not None else const(0)
    stop = walk.as_dim(part.stop) if part.stop is not None else dim
    step = walk.as_dim(part.step) if part.step is not None else const(1)
    if start is None or stop is None or step is None:
        return fresh()
    if step.value is not None and step.value != 1:
        return walk.quotient(dim, step)
    first, last = walk.concrete_dim(start), walk.concrete_dim(stop)
    if first is not None and first < 0:
        start = dim + start
    if last is not None and last < 0:
        stop = dim + stop
    if stop.value is not None and dim.value is not None:
        stop = const(min(stop.value, dim.value))
    return walk.simplify(stop - start)


def outer(walk: Walk, node: ast.AST, t: Tensor, args: list[Value], kw: dict[str, Value]) -> Value:
    other = args[0] if args else None
    if t.shape and isinstance(other, Tensor) and other.shape:
        return walk.tensor("outer", [t, other], (t.shape[0], other.shape[0]), node)
    return walk.tensor("outer", [t, *args], None, node)


METHODS: dict[str, Rule] = {
    "view": view,
    "reshape": view,
    "transpose": transpose,
    "swapaxes": transpose,
    "swapdims": transpose,
    "movedim": movedim,
    "moveaxis": movedim,
    "view_as": like_other("view_as"),
    "reshape_as": like_other("view_as"),
    "expand_as": like_other("expand_as"),
    "ravel": flatten,
    "permute": permute,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "flatten": flatten,
    "unflatten": unflatten,
    "expand": expand,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "split": split,
    "chunk": chunk,
    "tensor_split": chunk,
    "unbind": unbind,
    "index_select": index_select,
    "gather": gather,
    "narrow": narrow,
    "select": select,
    "outer": outer,
    **{name: mixing(name) for name in MIXING},
    **{name: same_shape(name) for name in ELEMENTWISE},
}
