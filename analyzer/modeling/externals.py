"""What calls to names outside the model's files return: a table (externals.yaml) and a few rules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvskill.analyzer.modeling import shapes
from kvskill.analyzer.modeling.dims import Dim, const, fresh
from kvskill.analyzer.modeling.values import (
    Bound,
    Const,
    Dict_,
    ExtInstance,
    ModuleSeq,
    Partial,
    Ref,
    Scalar,
    Tensor,
    Tup,
    Unknown,
    Value,
)

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.walk import Walk

__all__ = ["call_ext_instance", "call_external", "operator_name"]

_OP_PREFIXES = ("torch_npu.", "torch.ops.npu.", "torchair.ops.", "torch.ops.torch_npu.")
_CREATE = frozenset({"empty", "zeros", "ones", "full", "rand", "randn"})


@cache
def _table() -> dict[str, Any]:
    data: dict[str, Any] = yaml.load(
        (Path(__file__).parent / "externals.yaml").read_text(encoding="utf-8"), Loader=_loader()
    )
    return data


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def operator_name(name: str) -> str | None:
    """`npu:op` for an operator of torch_npu however it is reached, else None."""
    for prefix in _OP_PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            base = rest[: -len(".default")] if rest.endswith(".default") else rest
            return f"npu:{base}" if "." not in base else None
    return None


def call_external(walk: Walk, name: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> Value:
    """Call an outside function or class by qualified name."""
    from kvskill.analyzer.modeling import builtins as py

    if name.startswith("builtins."):
        return py.call_builtin(walk, name[len("builtins.") :], args, kwargs, node)
    if name == "functools.partial" and args:
        return Partial(args[0], tuple(args[1:]), kwargs)
    if name == "collections.OrderedDict":
        return py.call_builtin(walk, "dict", args, kwargs, node)
    op = operator_name(name) or name
    hook = walk.hooks.get(op)
    if hook is not None:
        result = hook(walk, node, args, kwargs)
        walk.record_call(op, node, args, kwargs, result)
        return result
    result = _dispatch(walk, op, args, kwargs, node)
    if isinstance(result, Tensor) and result.node is node:
        result.attrs.setdefault("given", (tuple(args), kwargs))
    walk.record_call(op, node, args, kwargs, result)
    return result


def _dispatch(walk: Walk, op: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> Value:
    spec = _table()["functions"].get(op)
    if spec is not None:
        results = [_result(walk, s, args, kwargs, node, op) for s in spec]
        return results[0] if len(results) == 1 else Tup(results)
    short = op[len("torch.nn.functional.") :] if op.startswith("torch.nn.functional.") else None
    if op.startswith("torch.nn.") and short is None:
        return _module(walk, op, args, kwargs)
    base = short or (op[len("torch.") :] if op.startswith("torch.") else None)
    if base is not None:
        value = _torch_function(walk, base, args, kwargs, node)
        if value is not None:
            return value
    if op == "operator.attrgetter" and len(args) == 1 and isinstance(args[0], Const):
        return Bound(args[0], "attrgetter")
    if op.startswith("math."):
        return _math(walk, op[len("math.") :], args)
    last = op.rsplit(".", 1)[-1]
    if last[:1].isupper() or last.endswith("[]"):
        return ExtInstance(op[:-2] if op.endswith("[]") else op, args, kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if tensors:
        return walk.tensor(f"?{op}", [*args, *kwargs.values()], None, node)
    return Unknown(op, tuple(args))


def _result(walk: Walk, spec: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call, op: str) -> Value:
    kind, _, pos = spec.partition(":")
    if kind == "unknown":
        return walk.tensor(op, [*args, *kwargs.values()], None, node)
    index = int(pos)
    source = args[index] if index < len(args) else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    shape = source.shape if isinstance(source, Tensor) else None
    if shape is not None and kind == "rows":
        shape = (*shape[:-1], fresh())
    if shape is not None and kind == "half":
        shape = (*shape[:-1], shape[-1].divide(const(2)) or Dim.atom(f"({shape[-1]})//2"))
    parents = [source, *[a for a in (*args, *kwargs.values()) if a is not source]] if source is not None else []
    return walk.tensor(op.rsplit(".", 1)[-1] if op.startswith("torch.") else op, parents, shape, node)


def _module(walk: Walk, op: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
    name = op[len("torch.nn.") :]
    if name == "ModuleList":
        items = args[0].items if args and isinstance(args[0], (Tup, ModuleSeq)) else []
        if args and not isinstance(args[0], (Tup, ModuleSeq)):
            return Unknown("ModuleList of an unknown sequence", tuple(args))
        return ModuleSeq(list(items))
    if name == "Sequential":
        return ModuleSeq(list(args))
    if name == "ModuleDict":
        if args and isinstance(args[0], Dict_):
            return ModuleSeq(list(args[0].items.values()), list(args[0].items))
        return ModuleSeq([], [])
    if name in ("Parameter", "parameter.Parameter", "Buffer"):
        source = args[0] if args else kwargs.get("data")
        shape = source.shape if isinstance(source, Tensor) else None
        made: list[Value] = [source] if isinstance(source, Tensor) and source.op not in _CREATE else []
        return walk.tensor("parameter", made, shape, None)
    if name.startswith("init."):
        return args[0] if args else Const(None)
    return ExtInstance(op, args, kwargs)


def _torch_function(walk: Walk, base: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> Value | None:
    first = args[0] if args else kwargs.get("input")
    rest = args[1:] if args else []
    kw = {k: v for k, v in kwargs.items() if k != "input"}
    if base in ("Tensor", "FloatTensor", "BFloat16Tensor", "tensor", "as_tensor"):
        empty = not args or (isinstance(first, Tup) and not first.items)
        shape: tuple[Dim, ...] | None = (const(0),) if empty else None
        if isinstance(first, Tup) and first.items:
            shape = (const(len(first.items)),)
        return walk.tensor("placeholder" if empty else "constant", list(args), shape, node)
    if base in _CREATE:
        sizes = first if isinstance(first, Tup) else Tup([a for a in args if walk.as_dim(a) is not None])
        named = kwargs.get("size")
        if isinstance(named, Tup):
            sizes = named
        if base == "full" and not isinstance(first, Tup):
            return walk.tensor(base, list(args), None, node)
        return walk.tensor(base, [], tuple(walk.as_dim(i) or fresh() for i in sizes.items), node)
    if base in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like"):
        return walk.tensor(base, [], first.shape if isinstance(first, Tensor) else None, node)
    if base == "arange":
        dims = [walk.as_dim(a) for a in args]
        size = dims[0] if len(args) == 1 else fresh()
        if len(args) == 2 and dims[0] is not None and dims[1] is not None:
            size = dims[1] - dims[0]
        return walk.tensor("arange", list(args), (size if size is not None else fresh(),), node)
    if base in ("cat", "concat", "concatenate", "stack"):
        return _cat(walk, base, args, kwargs, node)
    if base in ("matmul", "bmm", "mm") and isinstance(first, Tensor) and rest and isinstance(rest[0], Tensor):
        return walk.tensor(
            "matmul", [first, rest[0]], shapes.matmul_shape(walk, node, first.shape, rest[0].shape), node
        )
    if base == "baddbmm" and len(rest) >= 2 and isinstance(rest[0], Tensor) and isinstance(rest[1], Tensor):
        return baddbmm(walk, first, rest[0], rest[1], kw, node)
    if base == "addmm" and len(rest) >= 2 and isinstance(rest[0], Tensor) and isinstance(rest[1], Tensor):
        out = rest[1].shape[-1] if rest[1].shape else fresh()
        shape = (*rest[0].shape[:-1], out) if rest[0].shape else None
        return walk.tensor("linear", [rest[0], rest[1], *args[:1]], shape, node)
    if base == "einsum":
        equation = first.value if isinstance(first, Const) and isinstance(first.value, str) else None
        return walk.tensor("einsum", list(args), _einsum(equation, rest), node, equation=equation)
    if base == "where":
        tensors = [a for a in args if isinstance(a, Tensor)]
        shape = tensors[0].shape if tensors else None
        for t in tensors[1:]:
            shape = shapes.broadcast(walk, node, shape, t.shape)
        return walk.tensor("where", list(args), shape, node)
    if base == "linear" and isinstance(first, Tensor):
        weight = rest[0] if rest else kw.get("weight")
        wshape = weight.shape if isinstance(weight, Tensor) else None
        out = wshape[0] if wshape else fresh()
        shape = (*first.shape[:-1], out) if first.shape else None
        return walk.tensor("linear", [first, *rest], shape, node)
    if base == "embedding":
        index, weight = (first, rest[0] if rest else kw.get("weight"))
        wshape = weight.shape if isinstance(weight, Tensor) else None
        dim = wshape[-1] if wshape else fresh()
        ok = isinstance(index, Tensor) and index.shape is not None
        assert not ok or isinstance(index, Tensor)
        shape = (*index.shape, dim) if ok and isinstance(index, Tensor) and index.shape is not None else None
        return walk.tensor("embedding", list(args), shape, node)
    if base in ("triu", "tril") and isinstance(first, Tensor):
        return walk.tensor(
            base, list(args), first.shape, node, diagonal=kw.get("diagonal") or (rest[0] if rest else None)
        )
    if base in (
        "sigmoid",
        "tanh",
        "exp",
        "rsqrt",
        "sqrt",
        "relu",
        "pow",
        "mul",
        "add",
        "sub",
        "div",
        "neg",
        "abs",
        "cos",
        "sin",
        "clamp",
        "square",
        "logical_not",
        "logical_and",
        "logical_or",
        "logical_xor",
        "bitwise_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "nan_to_num",
        "eq",
        "ne",
        "maximum",
        "minimum",
        "dropout",
        "softplus",
        "hardtanh",
        "silu",
        "gelu",
    ):
        if isinstance(first, Tensor):
            shape = first.shape
            for other in rest:
                if isinstance(other, Tensor):
                    shape = shapes.broadcast(walk, node, shape, other.shape)
            return walk.tensor(base, [first, *rest], shape, node)
    if base == "view_as_complex" and isinstance(first, Tensor):
        return walk.tensor(base, [first], first.shape[:-1] if first.shape else None, node)
    if base == "view_as_real" and isinstance(first, Tensor):
        return walk.tensor(base, [first], (*first.shape, const(2)) if first.shape is not None else None, node)
    if base in ("polar", "complex") and isinstance(first, Tensor):
        return walk.tensor(base, list(args), first.shape, node)
    if base in ("bucketize", "searchsorted"):
        keys = first if base == "bucketize" else (rest[0] if rest else None)
        return walk.tensor(base, list(args), keys.shape if isinstance(keys, Tensor) else None, node)
    if base in ("finfo", "iinfo"):
        return Unknown(base)
    if base in ("no_grad", "inference_mode", "autocast", "is_grad_enabled", "get_default_dtype", "device"):
        return Unknown(base)
    rule = shapes.METHODS.get(base)
    if rule is not None and isinstance(first, Tensor):
        return rule(walk, node, first, rest, kw)
    if base == "scaled_dot_product_attention":
        q, v = _arg(args, kwargs, 0, "query"), _arg(args, kwargs, 2, "value")
        shape = None
        if isinstance(q, Tensor) and q.shape and isinstance(v, Tensor) and v.shape:
            shape = (*q.shape[:-1], v.shape[-1])
        return walk.tensor("sdpa", [*args, *kwargs.values()], shape, node)
    return None


def baddbmm(walk: Walk, base: Value | None, a: Tensor, b: Tensor, kw: dict[str, Value], node: ast.Call) -> Tensor:
    """`beta * base + alpha * (a @ b)`, in its parts."""
    out = walk.tensor("matmul", [a, b], shapes.matmul_shape(walk, node, a.shape, b.shape), node)
    alpha, beta = kw.get("alpha", Const(1)), kw.get("beta", Const(1))
    if alpha not in (Const(1), Const(1.0)):
        out = walk.tensor("mul", [out, alpha], out.shape, node)
    if isinstance(base, Tensor) and beta not in (Const(0), Const(0.0)):
        added = base if beta in (Const(1), Const(1.0)) else walk.tensor("mul", [base, beta], base.shape, node)
        out = walk.tensor("add", [out, added], out.shape, node)
    return out


def _arg(args: list[Value], kwargs: dict[str, Value], pos: int, name: str) -> Value | None:
    return args[pos] if pos < len(args) else kwargs.get(name)


def _cat(walk: Walk, base: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call) -> Value:
    seq = args[0] if args else kwargs.get("tensors")
    dim_arg = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", Const(0)))
    items = [t for t in seq.items if isinstance(t, Tensor)] if isinstance(seq, Tup) else []
    axis = shapes._int(dim_arg)
    if not items or axis is None or any(t.shape is None for t in items):
        return walk.tensor(base, list(items) or [seq] if seq is not None else [], None, node)
    first = items[0].shape
    assert first is not None
    rank = len(first) + (1 if base == "stack" else 0)
    if not -rank <= axis < rank:
        walk.problem(node, "rank", f"{base} along axis {axis} of {rank}")
        return walk.tensor(base, list(items), None, node)
    axis %= rank
    if base == "stack":
        return walk.tensor(base, list(items), (*first[:axis], const(len(items)), *first[axis:]), node, axis=axis)
    if any(t.shape is not None and len(t.shape) != len(first) for t in items):
        walk.problem(node, "rank", "cat of tensors with different ranks")
        return walk.tensor(base, list(items), None, node)
    total = const(0)
    for t in items:
        assert t.shape is not None
        total = total + t.shape[axis]
    return walk.tensor(base, list(items), (*first[:axis], walk.simplify(total), *first[axis + 1 :]), node, axis=axis)


def _einsum(equation: str | None, operands: list[Value]) -> tuple[Dim, ...] | None:
    """The shape of an explicit einsum without ellipsis; axes of unknown operands stay unknown."""
    if equation is None or "->" not in equation or "." in equation:
        return None
    left, right = equation.replace(" ", "").split("->")
    sizes: dict[str, Dim] = {}
    for term, value in zip(left.split(","), operands, strict=False):
        shape = value.shape if isinstance(value, Tensor) else None
        if shape is not None and len(shape) == len(term):
            for axis, dim in zip(term, shape, strict=True):
                if axis not in sizes or sizes[axis].wild:
                    sizes[axis] = dim
    return tuple(sizes.get(axis) or fresh() for axis in right)


def _math(walk: Walk, name: str, args: list[Value]) -> Value:
    import math

    if args and all(isinstance(a, Const) for a in args):
        try:
            return Const(getattr(math, name)(*[a.value for a in args if isinstance(a, Const)]))
        except (AttributeError, TypeError, ValueError):
            return Unknown(name)
    if args and isinstance(args[0], (Scalar, Ref)):
        return Scalar(f"math.{name}({', '.join(walk.as_text(a) for a in args)})")
    return Unknown(f"math.{name}", tuple(args))


def call_ext_instance(
    walk: Walk, obj: ExtInstance, args: list[Value], kwargs: dict[str, Value], node: ast.Call
) -> Value:
    """Call an object of an outside class: linear layers, norms, embeddings, the target's module library."""
    first = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    if not isinstance(first, Tensor):
        return Unknown(obj.name, tuple(args))
    if obj.name == "torch.nn.Softmax":
        axis = obj.kwargs.get("dim", obj.args[0] if obj.args else Const(None))
        return shapes.METHODS["softmax"](walk, node, first, [axis], {})
    spec = _table()["modules"].get(obj.name)
    shape = first.shape
    kind = "module"
    if isinstance(spec, dict):
        (rule, (arg, pos)) = next(iter(spec.items()))
        value = obj.kwargs.get(arg, obj.args[pos] if pos < len(obj.args) else None)
        dim = (walk.as_dim(value) if value is not None else None) or fresh()
        if rule == "shard" and not dim.wild:
            ways = walk.as_dim(obj.kwargs.get("tp_size", obj.args[3] if len(obj.args) > 3 else Const(1)))
            dim = walk.quotient(dim, ways) if ways is not None else fresh()
        if shape is not None:
            shape = (*shape, dim) if rule == "embed" else (*shape[:-1], dim)
        kind = "embedding" if rule == "embed" else "linear"
    elif spec == "same":
        kind = "pointwise"
    elif any(obj.name.startswith(p) for p in _table()["row_wise_packages"]):
        shape = (*shape[:-1], fresh()) if shape is not None else None
        kind = "linear"
    else:
        shape = None
    out = walk.tensor(
        kind, [first, *args[1:], *[v for v in kwargs.values() if v is not first]], shape, node, module=obj
    )
    walk.record_call(f"module:{obj.name}", node, args, kwargs, out)
    return out
