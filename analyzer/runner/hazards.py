"""Known mistakes of hand-paged runners, each at its line (operator sheet 16: items 11, 12, 14, 19; A6, B(k))."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from kvskill.analyzer.runner.calls import Attend, attends, custom_operators
from kvskill.analyzer.runner.files import Function, functions, leaf, own_name
from kvskill.diagnostics import Diagnostic, Severity
from kvskill.source import SourceFile

__all__ = ["find_hazards"]


def find_hazards(files: Sequence[SourceFile]) -> tuple[Diagnostic, ...]:
    """All hazards, in file order. They are warnings: the code may run where its sizes happen to fit."""
    calls = [a for a in attends(files) if a.paged]
    sizes = _block_size_names(files, calls)
    floors = list(_floor_divisions(files, sizes))
    lengths = {name for _, node in floors if (name := own_name(node.left)) is not None}
    keys = _settings_of(files, lengths)
    lengths |= {n for f in files for n, key in _setting_names(f) if key in keys}
    found = [
        *(_floor(file, node) for file, node in floors),
        *_strides(files, lengths),
        *_absorbed_prefill(calls),
        *_custom(files),
        *_whole_rank(files, calls),
        *_cumulative(calls),
        *_without_new_token(files),
    ]
    return tuple(sorted(dict.fromkeys(found), key=lambda d: (d.span, d.code)))


def _warn(code: str, fact: str, todo: str, file: SourceFile, node: ast.AST) -> Diagnostic:
    return Diagnostic(code, Severity.WARNING, fact, todo, file.span(node))


def _setting_names(file: SourceFile) -> Iterator[tuple[str, str]]:
    """(name, key) of assignments from `....get("key", default)`."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        call = node.value
        if leaf(call.func) == "get" and call.args and isinstance(call.args[0], ast.Constant):
            for target in node.targets:
                if (name := own_name(target)) is not None and isinstance(call.args[0].value, str):
                    yield name, call.args[0].value


def _settings_of(files: Iterable[SourceFile], names: set[str]) -> set[str]:
    return {key for f in files for name, key in _setting_names(f) if name in names}


def _block_size_names(files: Sequence[SourceFile], calls: Sequence[Attend]) -> set[str]:
    """Names that hold the block size: what the attention calls get, and what comes from that setting or by its name."""
    names = {n for a in calls if "block_size" in a.args and (n := own_name(a.args["block_size"])) is not None}
    keys = _settings_of(files, names) | {"pa_block_size", "block_size"}  # the settings' own names
    return names | {n for f in files for n, key in _setting_names(f) if key in keys}


def _floor_divisions(files: Iterable[SourceFile], sizes: set[str]) -> Iterator[tuple[SourceFile, ast.BinOp]]:
    """`length // block_size` that is not written as a rounding up."""
    for file in files:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
                continue
            if own_name(node.right) not in sizes or own_name(node.left) is None:
                continue  # (n + size - 1) // size and -(-n // size) have no plain name on the left
            yield file, node


def _floor(file: SourceFile, node: ast.BinOp) -> Diagnostic:
    length, size = ast.unparse(node.left), ast.unparse(node.right)
    return _warn(
        "KV282",
        f"`{length} // {size}` loses the last, partial block when {length} is no multiple of {size}.",
        f"Round up: `({length} + {size} - 1) // {size}`, or make the length a multiple.",
        file,
        node,
    )


def _strides(files: Iterable[SourceFile], lengths: set[str]) -> Iterator[Diagnostic]:
    """Row strides of slots that are a cache length instead of blocks times block size."""
    for file in files:
        for func in functions(file):
            local = {
                t.id
                for n in ast.walk(func.node)
                if isinstance(n, ast.Assign) and own_name(n.value) in lengths
                for t in n.targets
                if isinstance(t, ast.Name)
            }
            for node in ast.walk(func.node):
                if not isinstance(node, ast.Call) or leaf(node.func) != "arange":
                    continue
                step = len(node.args) == 3 and own_name(node.args[2]) in lengths | local
                start = bool(node.args) and _row_start(node.args[0], lengths | local)
                if step or start:
                    yield _warn(
                        "KV283",
                        "Slots of consecutive rows are a cache length apart, while the block table gives a row whole "
                        "blocks.",
                        "Use the stride `blocks per row * block_size`; the two differ unless the length is a multiple "
                        "of the block size.",
                        file,
                        node,
                    )


def _row_start(node: ast.expr, lengths: set[str]) -> bool:
    """`length * i` or `i * length`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    return own_name(node.left) in lengths or own_name(node.right) in lengths


def _absorbed_prefill(calls: Iterable[Attend]) -> Iterator[Diagnostic]:
    for a in calls:
        if a.latent and a.prefill:
            yield _warn(
                "KV284",
                "Prefill attends over the latent cache; the operator profile allows 16 query tokens per request there.",
                "Expand K and V for prefill (layout NTD_TND, head size 128 + 64), or use a CANN release that lifts the "
                "limit.",
                a.inside.file,
                a.call,
            )


def _custom(files: Sequence[SourceFile]) -> Iterator[Diagnostic]:
    for file, node in custom_operators(files):
        yield _warn(
            "KV285",
            f"`torch.ops.custom.{node.attr}` is in no torch_npu wheel.",
            "Build and load the custom operator package first; a CPU cannot run this path.",
            file,
            node,
        )


def _whole_rank(files: Sequence[SourceFile], calls: Iterable[Attend]) -> Iterator[Diagnostic]:
    """A token-major cache that goes to the operator with its four dims."""
    for a in calls:
        key = a.args.get("key")
        if key is None or "query_rope" in a.args:
            continue
        name = own_name(key)
        if name is None or _viewed(a.inside.node, name):
            continue
        if _four_dims(files, name):
            yield _warn(
                "KV286",
                f"`{name}` goes to the operator with four dims, which are read as [blocks, heads, block_size, dim].",
                f"Pass `{name}.view(*{name}.shape[:2], -1)`.",
                a.inside.file,
                key,
            )


def _viewed(func: ast.FunctionDef, name: str) -> bool:
    """Is the name rebound to a view before it is used?"""
    return any(
        isinstance(n, ast.Assign)
        and any(own_name(t) == name for t in n.targets)
        and isinstance(n.value, ast.Call)
        and leaf(n.value.func) in ("view", "reshape", "flatten")
        for n in ast.walk(func)
    )


def _four_dims(files: Iterable[SourceFile], name: str) -> bool:
    """Is a tensor of this name allocated with four dims anywhere in the folder?"""
    for file in files:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Assign) or not any(own_name(t) == name for t in node.targets):
                continue
            if isinstance(node.value, ast.Call) and leaf(node.value.func) in ("zeros", "empty", "ones"):
                args = node.value.args
                if len(args) == 1 and isinstance(args[0], (ast.Tuple, ast.List)):
                    args = list(args[0].elts)
                if len(args) == 4:
                    return True
    return False


def _cumulative(calls: Iterable[Attend]) -> Iterator[Diagnostic]:
    """Cumulative key lengths beside a block table."""
    for a in calls:
        lengths = a.args.get("actual_seq_lengths_kv", a.args.get("actual_seq_kvlen"))
        if lengths is None:
            continue
        source = _value_in(a.inside.node, lengths)
        if any(isinstance(n, ast.Call) and leaf(n.func) == "cumsum" for n in ast.walk(source)):
            yield _warn(
                "KV287",
                "Cumulative key lengths are passed together with a block table.",
                "Pass the length of each sequence; only unpaged TND calls take cumulative key lengths.",
                a.inside.file,
                lengths,
            )


def _value_in(func: ast.FunctionDef, node: ast.expr) -> ast.expr:
    """What a name was last assigned in the function; the expression itself otherwise."""
    name = own_name(node)
    found = [
        n.value
        for n in ast.walk(func)
        if isinstance(n, ast.Assign) and name is not None and any(own_name(t) == name for t in n.targets)
    ]
    return found[-1] if found else node


def _without_new_token(files: Iterable[SourceFile]) -> Iterator[Diagnostic]:
    """A decode step that writes at position `n` and shows the operator `n` keys."""
    for file in files:
        for func in functions(file):
            yield from _lengths_in(func)


def _lengths_in(func: Function) -> Iterator[Diagnostic]:
    slots = {name for n in ast.walk(func.node) if (name := _slot_base(n)) is not None}
    changed = {
        own_name(t)
        for n in ast.walk(func.node)
        if isinstance(n, (ast.Assign, ast.AugAssign))
        for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
    }
    for node in ast.walk(func.node):
        pairs: list[tuple[str | None, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(own_name(t), node.value) for t in node.targets]
        elif isinstance(node, ast.keyword):
            pairs = [(node.arg, node.value)]
        for name, value in pairs:
            if name not in ("actual_seq_lengths_kv", "actual_seq_kvlen"):
                continue
            base = _bare(value)
            if base in slots and base not in changed:
                yield _warn(
                    "KV288",
                    f"The step writes the new token at position `{base}` and shows the operator only `{base}` keys.",
                    f"Pass `{base} + 1`: the length counts the token just written.",
                    func.file,
                    value,
                )


def _slot_base(node: ast.AST) -> str | None:
    """The name `n` of a slot formula `n.view(-1, 1) + offset` that is bound or passed as slots."""
    value: ast.expr | None = None
    names: list[str | None] = []
    if isinstance(node, ast.Assign):
        names = [own_name(t) for t in node.targets]
    elif isinstance(node, ast.keyword):
        names = [node.arg]
    if isinstance(node, (ast.Assign, ast.keyword)) and any("slot" in (n or "") for n in names):
        value = node.value
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        for side in (value.left, value.right):
            base = _bare(side)
            if base is not None and "offset" not in base:
                return base
    return None


def _bare(node: ast.expr) -> str | None:
    """The name under `.to(..)`, `.view(..)`, `.tolist()` and their like, without arithmetic."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr not in ("to", "view", "reshape", "tolist", "cpu", "numpy", "detach", "int", "clone"):
            return None
        node = node.func.value
    return own_name(node)
