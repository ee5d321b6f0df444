"""Results of the attention and cache operators (schemas: operator table; layouts: operator sheet section 2)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvskill.analyzer.modeling.dims import Dim
from kvskill.analyzer.modeling.values import Const, Tensor, Tup, Unknown, Value

if TYPE_CHECKING:
    from kvskill.analyzer.modeling.walk import Walk

__all__ = ["ATTEND_OPS", "HOOKS", "WRITE_OPS", "argument"]

Hook = Callable[["Walk", ast.Call, list[Value], dict[str, Value]], Value]

# operator -> names of its leading positional arguments
ATTEND_OPS = {
    "npu:npu_fused_infer_attention_score": ("query", "key", "value"),
    "npu:npu_fused_infer_attention_score_v2": ("query", "key", "value"),
    "npu:npu_incre_flash_attention": ("query", "key", "value"),
    "npu:npu_prompt_flash_attention": ("query", "key", "value"),
    "npu:npu_fusion_attention": ("query", "key", "value"),
    "torch.nn.functional.scaled_dot_product_attention": ("query", "key", "value"),
}
WRITE_OPS = {
    "npu:scatter_update_": ("input", "indices", "updates", "axis"),
    "npu:scatter_update": ("input", "indices", "updates", "axis"),
    "npu:npu_scatter_nd_update_": ("input", "indices", "updates"),
    "npu:npu_scatter_nd_update": ("input", "indices", "updates"),
    "npu:npu_kv_rmsnorm_rope_cache": ("kv", "gamma", "cos", "sin", "index", "k_cache", "ckv_cache"),
    "npu:npu_kv_rmsnorm_rope_cache_v2": ("kv", "gamma", "cos", "sin", "index", "k_cache", "ckv_cache"),
    "npu:npu_scatter_pa_kv_cache": ("key", "value", "key_cache", "value_cache", "slot_mapping"),
}


def argument(op: str, args: list[Value], kwargs: dict[str, Value], name: str) -> Value | None:
    """An argument of an operator by name, given by position or keyword."""
    if name in kwargs:
        return kwargs[name]
    order = {**ATTEND_OPS, **WRITE_OPS}.get(op, ())
    if name in order and order.index(name) < len(args):
        return args[order.index(name)]
    return None


def _fa(walk: Walk, node: ast.Call, args: list[Value], kwargs: dict[str, Value]) -> Value:
    q = args[0] if args else kwargs.get("query")
    layout = kwargs.get("input_layout", Const("BSH"))
    shape: tuple[Dim, ...] | None = q.shape if isinstance(q, Tensor) else None
    name = layout.value if isinstance(layout, Const) and isinstance(layout.value, str) else None
    if shape is not None and name is not None and "_" in name:
        left, right = name.split("_", 1)
        shape = _relayout(shape, left, right)
    if name is None:
        shape = None
    out = walk.tensor("fa", [*args, *kwargs.values()], shape, node, layout=name)
    lse = walk.tensor("lse", [out], None, node)
    return Tup([out, lse])


def _relayout(shape: tuple[Dim, ...], left: str, right: str) -> tuple[Dim, ...] | None:
    if len(left) != len(shape):
        return None
    by_axis = dict(zip(left, shape, strict=True))
    return tuple(by_axis[a] for a in right) if set(left) == set(right) else None


def _returns(index: int, name: str) -> Hook:
    def hook(walk: Walk, node: ast.Call, args: list[Value], kwargs: dict[str, Value]) -> Value:
        data = args[index] if index < len(args) else kwargs.get(name)
        if isinstance(data, Tensor):
            return walk.tensor("written", [data], data.shape, node)
        return Unknown("write", tuple(args))

    return hook


def _kv_rmsnorm(walk: Walk, node: ast.Call, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """(k_cache, ckv_cache, rope part, latent); the fresh parts have the rows of `kv` (operator sheet 12.1)."""
    caches = [walk.tensor("kv_rmsnorm", [*args, *kwargs.values()], None, node) for _ in range(2)]
    fresh = _kv_rmsnorm_v2(walk, node, args, kwargs)
    assert isinstance(fresh, Tup)
    return Tup([*caches, *fresh.items])


def _kv_rmsnorm_v2(walk: Walk, node: ast.Call, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """(rope part, latent)."""
    kv = argument("npu:npu_kv_rmsnorm_rope_cache_v2", args, kwargs, "kv")
    gamma = argument("npu:npu_kv_rmsnorm_rope_cache_v2", args, kwargs, "gamma")
    rope = latent = None
    if isinstance(kv, Tensor) and kv.shape and isinstance(gamma, Tensor) and gamma.shape:
        latent = (*kv.shape[:-1], gamma.shape[-1])
        rope = (*kv.shape[:-1], kv.shape[-1] - gamma.shape[-1])
    inputs = [*args, *kwargs.values()]
    return Tup(
        [
            walk.tensor("kv_rmsnorm", inputs, rope, node, part="rope"),
            walk.tensor("kv_rmsnorm", inputs, latent, node, part="latent"),
        ]
    )


def _transpose_batchmatmul(walk: Walk, node: ast.Call, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """permute(permute(x1) @ permute(x2)); a scale or bias is not followed (operator table)."""
    from kvskill.analyzer.modeling import shapes

    given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    x1, x2 = given.get("input"), given.get("weight")
    plain = all(given.get(n, Const(None)) == Const(None) for n in ("bias", "scale")) and len(args) <= 2
    if not (isinstance(x1, Tensor) and isinstance(x2, Tensor) and plain):
        return walk.tensor("?npu:npu_transpose_batchmatmul", [*args, *kwargs.values()], None, node)

    def turned(t: Tensor, name: str, default: tuple[int, ...]) -> Tensor | None:
        order = given.get(name)
        axes = [a.value for a in order.items if isinstance(a, Const)] if isinstance(order, Tup) else list(default)
        if sorted(axes) != [0, 1, 2] or (order is not None and not isinstance(order, Tup)):
            return None
        if axes == [0, 1, 2]:
            return t
        shape = None if t.shape is None else tuple(t.shape[a] for a in axes)
        return walk.tensor("permute", [t], shape, node)

    a, b = turned(x1, "perm_x1", (0, 1, 2)), turned(x2, "perm_x2", (0, 1, 2))
    if a is None or b is None:
        return walk.tensor("?npu:npu_transpose_batchmatmul", [*args, *kwargs.values()], None, node)
    out = walk.tensor("matmul", [a, b], shapes.matmul_shape(walk, node, a.shape, b.shape), node)
    return turned(out, "perm_y", (1, 0, 2)) or out


HOOKS: dict[str, Hook] = {
    "npu:npu_transpose_batchmatmul": _transpose_batchmatmul,
    "npu:npu_fused_infer_attention_score": _fa,
    "npu:npu_fused_infer_attention_score_v2": _fa,
    "npu:npu_incre_flash_attention": lambda w, n, a, k: w.tensor(
        "fa", [*a, *k.values()], getattr(a[0], "shape", None) if a else None, n
    ),
    "npu:npu_prompt_flash_attention": lambda w, n, a, k: w.tensor(
        "fa", [*a, *k.values()], getattr(a[0], "shape", None) if a else None, n
    ),
    "npu:scatter_update_": _returns(0, "input"),
    "npu:scatter_update": _returns(0, "input"),
    "npu:npu_scatter_nd_update_": _returns(0, "input"),
    "npu:npu_scatter_nd_update": _returns(0, "input"),
    "npu:npu_kv_rmsnorm_rope_cache": _kv_rmsnorm,
    "npu:npu_kv_rmsnorm_rope_cache_v2": _kv_rmsnorm_v2,
}
