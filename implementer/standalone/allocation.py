"""Where the contiguous caches are allocated, and the edits that allocate blocks there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvskill.analyzer.runner.files import Function, functions, leaf, own_name
from kvskill.implementer.framework.context import Context
from kvskill.implementer.textops import block_of, insert_before, remove_statements, replace_expr, statements
from kvskill.source import SourceFile

__all__ = ["Allocation", "convert_allocation", "find_allocations"]

_NEW = ("zeros", "empty", "ones", "full")
_LIKE = ("zeros_like", "empty_like", "ones_like")


@dataclass(frozen=True, eq=False)
class Allocation:
    """A function that builds one (k, v) pair for each layer in a loop."""

    inside: Function
    loop: ast.For | ast.ListComp
    calls: tuple[ast.Call, ...]  # torch.zeros and the like, K first; *_like calls are not among them


def find_allocations(files: Iterable[SourceFile]) -> list[Allocation]:
    """All functions in which a loop (or comprehension) makes two tensors and joins them in a tuple or list."""
    out = []
    for file in files:
        for func in functions(file):
            for loop in [n for n in ast.walk(func.node) if isinstance(n, (ast.For, ast.ListComp))]:
                calls = _pair(loop)
                if calls:
                    out.append(Allocation(func, loop, calls))
    return out


def _pair(loop: ast.For | ast.ListComp) -> tuple[ast.Call, ...]:
    made: dict[str, ast.Call] = {}
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and leaf(node.value.func) in _NEW + _LIKE:
            for target in node.targets:
                if (name := own_name(target)) is not None:
                    made[name] = node.value
    for node in ast.walk(loop):
        if isinstance(node, (ast.Tuple, ast.List)) and len(node.elts) == 2:
            calls = [made.get(own_name(e) or "") if not isinstance(e, ast.Call) else e for e in node.elts]
            found = [c for c in calls if c is not None and leaf(c.func) in _NEW + _LIKE]
            if len(found) == 2:
                return tuple(c for c in found if leaf(c.func) in _NEW)
    return ()


def convert_allocation(
    ctx: Context,
    alloc: Allocation,
    config: Mapping[str, Any],
    cache_class: str,
    latent: tuple[int, int] | None = None,
) -> bool:
    """Allocate blocks instead of rows; False when the shape is not certain (then it was refused).

    `latent`: the sizes of the two tensors of a pair whose parts are a latent and a rope part, in their order.
    """
    file, func = alloc.inside.file, alloc.inside.node
    values = _Values(alloc.inside, config)
    shapes = [_shape(func, call) for call in alloc.calls]
    parts = _pair_parts(shapes, values) if latent is None else _latent_parts(shapes, values, latent)
    if parts is None:
        ctx.refuse(
            file,
            alloc.calls[0],
            "KV290",
            "The shape of the cache is not certain to be [batch, length, heads * dim] or one of its four-dim forms.",
            "Write it with the number of KV heads and the head size as separate factors.",
        )
        return False
    batch, length = (file.segment(p) for p in parts[:2])
    per_cache = [("1" if h is None else file.segment(h), file.segment(d)) for h, d in parts[2]]
    device = next((file.segment(k.value) for k in alloc.calls[0].keywords if k.arg == "device"), "None")
    me = func.args.args[0].arg if func.args.args and alloc.inside.owner is not None else None
    if me is None:
        ctx.refuse(file, func, "KV290", "The caches are allocated outside a class.", "Allocate them in a method.")
        return False
    size = _block_size(alloc.inside, me, ctx.manifest.block_size.value)
    edits = ctx.edit_set(file)
    names = [ctx.fresh_name(func, f"paged_{n}") for n in ("block_size", *_shape_names(per_cache))]
    text = (
        f"# paged cache: blocks of each row, block table and slots are kept here\n"
        f"{names[0]} = {size}\n"
        f"{me}.paged_kv = {cache_class}({batch}, {length}, {names[0]}, {device})\n"
    )
    for name, (heads, dim) in zip(names[1:], per_cache, strict=True):
        text += f"{name} = {me}.paged_kv.shape({heads}, {dim})\n"
    holder = next(s for s in statements(func.body) if any(n is alloc.loop for n in ast.walk(s)))
    before = _outermost(func, holder)
    insert_before(edits, before, text, "block table", ctx.unit(func, file))
    for i, call in enumerate(alloc.calls):
        new = names[1:][min(i, len(per_cache) - 1)]
        args = list(call.args) or [k.value for k in call.keywords if k.arg == "size"]
        if leaf(call.func) == "full" or not args:
            ctx.refuse(file, call, "KV290", "The cache is not made by zeros, ones or empty.", "Use torch.zeros.")
            return False
        if len(args) == 1:
            replace_expr(edits, args[0], new, "blocks instead of rows")
        else:
            start, end = file.byte_range(args[0])[0], file.byte_range(args[-1])[1]
            edits.add(start, end, new, "blocks instead of rows")
    read = {n.id for t in (batch, length, size, device, *sum(per_cache, ())) for n in _names(t)}
    _drop_unread(ctx, alloc, read)
    return True


def _shape_names(per_cache: list[tuple[str, str]]) -> tuple[str, ...]:
    return ("shape",) if len(per_cache) == 1 else ("first_shape", "second_shape")


_Sizes = list[tuple[ast.expr | None, ast.expr]]  # (heads, None for one; size)


def _pair_parts(
    shapes: list[list[ast.expr] | None], values: _Values
) -> tuple[ast.expr, ast.expr, _Sizes] | None:
    """(batch, length, [(KV heads, head size)]) of K and V caches of one shape."""
    first = shapes[0]
    same = first is not None and all(
        s is not None and [ast.dump(a) for a in s] == [ast.dump(a) for a in first] for s in shapes
    )
    parts = _parts(first, values) if same and first is not None else None
    return None if parts is None else (parts[0], parts[1], [(parts[2], parts[3])])


def _latent_parts(
    shapes: list[list[ast.expr] | None], values: _Values, sizes: tuple[int, int]
) -> tuple[ast.expr, ast.expr, _Sizes] | None:
    """(batch, length, [(1, size), (1, size)]) of [B, S, size], [B, S, 1, size] or [B, 1, S, size], each its own."""
    out: list[tuple[ast.expr, ast.expr, ast.expr]] = []
    for shape, size in zip(shapes, sizes, strict=False):
        if shape is None or values.value(shape[-1]) != size:
            return None
        axes = shape[:-1]
        if len(axes) == 3:
            ones = [a for a in axes[1:] if values.value(a) == 1]
            if len(ones) != 1:
                return None
            axes = [a for a in axes if a is not ones[0]]
        out.append((axes[0], axes[1], shape[-1]))
    if len(out) != 2 or len(shapes) != 2:
        return None
    if any(ast.dump(a) != ast.dump(b) for a, b in zip(out[0][:2], out[1][:2], strict=True)):
        return None
    return out[0][0], out[0][1], [(None, o[2]) for o in out]


def _names(text: str) -> list[ast.Name]:
    return [n for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)]


def _drop_unread(ctx: Context, alloc: Allocation, read: set[str]) -> None:
    """Assignments of the old shape that only the replaced arguments read; `read` is what the new text reads."""
    file, func = alloc.inside.file, alloc.inside.node
    args = {id(n) for c in alloc.calls for a in c.args for n in ast.walk(a)}
    inside = {n.id for c in alloc.calls for a in c.args for n in ast.walk(a) if isinstance(n, ast.Name)}
    gone: set[ast.stmt] = set()
    for name in inside:
        reads = [
            n
            for n in ast.walk(func)
            if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) and id(n) not in args
        ]
        sets = [s for s in ast.walk(func) if isinstance(s, ast.Assign) and any(own_name(t) == name for t in s.targets)]
        if not reads and len(sets) == 1 and len(sets[0].targets) == 1 and _plain(sets[0].value):
            if name not in read:
                gone.add(sets[0])
    if gone:
        remove_statements(ctx.edit_set(file), func, gone, "the old shape")


def _plain(node: ast.expr) -> bool:
    """Only names, attributes, numbers, arithmetic and max or min."""
    return all(leaf(n.func) in ("max", "min", "int") for n in ast.walk(node) if isinstance(n, ast.Call))


def _outermost(func: ast.FunctionDef, stmt: ast.stmt) -> ast.stmt:
    block = block_of(func, stmt)
    return stmt if stmt in block else block[0]


def _shape(func: ast.FunctionDef, call: ast.Call) -> list[ast.expr] | None:
    """The elements of the shape argument, names followed inside the function."""
    args: list[ast.expr] = list(call.args)
    if not args:
        args = [k.value for k in call.keywords if k.arg == "size"]
    if len(args) == 1 and isinstance(args[0], ast.Name):
        found = _assigned(func, args[0].id)
        if len(found) != 1:
            return None
        args = [found[0]]
    if len(args) == 1 and isinstance(args[0], (ast.Tuple, ast.List)):
        args = list(args[0].elts)
    return args if len(args) in (3, 4) else None


def _assigned(func: ast.AST, name: str) -> list[ast.expr]:
    """What is assigned to a name (or to `self.name`), by itself or as an element of a tuple."""
    out: list[ast.expr] = []
    for n in ast.walk(func):
        if not isinstance(n, ast.Assign):
            continue
        for t in n.targets:
            if own_name(t) == name:
                out.append(n.value)
            elif isinstance(t, ast.Tuple) and any(own_name(e) == name for e in t.elts):
                found = n.value.elts if isinstance(n.value, ast.Tuple) else []
                pairs = zip(t.elts, found, strict=False) if len(found) == len(t.elts) else []
                out += [v for e, v in pairs if own_name(e) == name] or [n.value]
    return out


def _parts(shape: list[ast.expr], values: _Values) -> tuple[ast.expr, ast.expr, ast.expr, ast.expr] | None:
    """(batch, length, KV heads, head size) of [B, S, H], [B, S, N, D] or [B, N, S, D]."""
    if len(shape) == 3:
        factors = values.factors(shape[2])
        return (shape[0], shape[1], *factors) if factors is not None else None
    first, second = values.heads(shape[1]), values.heads(shape[2])
    if values.dim(shape[3]) and first != second:
        return (shape[0], shape[2], shape[1], shape[3]) if first else (shape[0], shape[1], shape[2], shape[3])
    return None


class _Values:
    """Integers of shape expressions, from the config; every parallel size is 1."""

    def __init__(self, inside: Function, config: Mapping[str, Any]) -> None:
        self.inside, self.config = inside, config
        heads = config.get("num_attention_heads")
        self.kv_heads = config.get("num_key_value_heads", heads)
        self.head_dim = config.get("head_dim")
        if self.head_dim is None and isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
            self.head_dim = config["hidden_size"] // heads

    def heads(self, node: ast.expr) -> bool:
        return self._says(node, "head") and self.value(node) == self.kv_heads and not self._says(node, "head_dim")

    def dim(self, node: ast.expr) -> bool:
        value = self.value(node)
        if value is None:  # a setting that this config leaves to its class
            return isinstance(node, ast.Attribute) and node.attr == "head_dim"
        return value == self.head_dim and (self._says(node, "dim") or self._says(node, "size"))

    def factors(self, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
        """(heads, dim) of a product."""
        if isinstance(node, ast.Name):
            found = _assigned(self.inside.node, node.id)
            return self.factors(found[0]) if len(found) == 1 else None
        if own_name(node) is not None and self.inside.owner is not None:
            found = _assigned(self.inside.owner, own_name(node) or "")
            return self.factors(found[0]) if len(found) == 1 else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for heads, dim in ((node.left, node.right), (node.right, node.left)):
                if self.heads(heads) and self.dim(dim):
                    return heads, dim
        return None

    def _says(self, node: ast.expr, word: str, depth: int = 0) -> bool:
        """Does the expression, or what its names stand for, mention a setting with this word?"""
        for n in ast.walk(node):
            text = leaf(n) if isinstance(n, (ast.Name, ast.Attribute)) else None
            if text is None:
                continue
            if word in text:
                return True
            if depth < 3 and isinstance(n, ast.Name):
                if any(self._says(v, word, depth + 1) for v in _assigned(self.inside.node, text)):
                    return True
        return False

    def value(self, node: ast.expr, depth: int = 0) -> int | None:
        if depth > 6:
            return None
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) else None
        if isinstance(node, ast.Attribute):
            own = own_name(node)
            if own is not None and self.inside.owner is not None:
                found = _assigned(self.inside.owner, own)
                if len(found) == 1:
                    return self.value(found[0], depth + 1)
            known = self.config.get(node.attr)
            if isinstance(known, int):
                return known
            return 1 if node.attr.endswith("_size") and ("tp" in node.attr or "dp" in node.attr) else None
        if isinstance(node, ast.Name):
            found = _assigned(self.inside.node, node.id)
            return self.value(found[0], depth + 1) if len(found) == 1 else None
        if isinstance(node, ast.BinOp):
            a, b = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
            if a is None or b is None:
                return None
            if isinstance(node.op, ast.Mult):
                return a * b
            if isinstance(node.op, ast.FloorDiv) and b:
                return a // b
            return None
        if isinstance(node, ast.Call) and leaf(node.func) in ("max", "min", "int"):
            parts = [self.value(a, depth + 1) for a in node.args]
            known_parts = [p for p in parts if p is not None]
            if len(known_parts) != len(parts) or not parts:
                return None
            return max(known_parts) if leaf(node.func) == "max" else min(known_parts)
        if isinstance(node, ast.Call) and leaf(node.func) == "get" and node.args:
            key = node.args[0]
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.endswith("_size"):
                return 1
        return None


def _block_size(inside: Function, me: str, default: int) -> str:
    """`pa_block_size` of the runner's settings where the object keeps them."""
    owner = inside.owner
    kept = owner is not None and any(
        isinstance(n, ast.Attribute) and n.attr == "runner_settings" and own_name(n) is not None
        for n in ast.walk(owner)
    )
    if not kept:
        return str(default)
    return f'({me}.runner_settings.get("model_config") or {{}}).get("pa_block_size", {default})'
