"""The framework's sizing formulas, and the ones a target's own source states.

`block_num` and the lengths mirror executor/core/kv_cache/cache_utils.py and the engine; every term is named
in `kvskill/data/memory_formulas.yaml`. `read_formulas` takes the length expressions from the target at
hand, so that a target of an unknown date is sized by what it says and not by what is known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.target.classes import SourceTree
from kvskill.analyzer.yamls import RunSettings
from kvskill.diagnostics import Span
from kvskill.source import SourceFile

__all__ = ["Formulas", "block_num", "evaluate", "itemsize", "newest_formulas", "read_formulas"]


@dataclass(frozen=True)
class Formulas:
    """Length expressions over run settings, where they stand (None: from the table), and what else the
    target has.
    """

    max_total_len: str
    legacy_seq_len: str
    max_total_len_at: Span | None = None
    legacy_at: Span | None = None
    partitions: bool = True  # the batch is divided by offline_prefill_dp_group_size
    alignment: int = 0  # bytes to which each cache tensor is aligned, 0 none

    def total(self, run: RunSettings) -> int:
        """Tokens one request may hold offline."""
        return evaluate(self.max_total_len, run)

    def legacy(self, run: RunSettings) -> int:
        """Tokens per row of a Legacy cache."""
        return evaluate(self.legacy_seq_len, run)


def newest_formulas() -> Formulas:
    """The newest formulas of the table."""
    table = load_yaml("memory_formulas.yaml")
    return Formulas(table["max_total_len"][-1]["offline"], table["legacy_seq_len"][-1]["offline"])


def read_formulas(tree: SourceTree | None) -> Formulas:
    """The formulas that the target's source states; the newest known ones where it states none that can be
    read.
    """
    newest = newest_formulas()
    if tree is None:
        return newest
    total = _offline_expression(tree, "max_total_len")
    legacy = _offline_expression(tree, "cache_seq_len", function="init_kvcache") or _offline_expression(
        tree, "cache_seq_len"
    )
    return Formulas(
        total[0] if total else newest.max_total_len,
        legacy[0] if legacy else newest.legacy_seq_len,
        total[1] if total else None,
        legacy[1] if legacy else None,
        _partitions(tree),
        _alignment(tree),
    )


def evaluate(expression: str, run: RunSettings) -> int:
    """The value of a length expression; whole numbers, + - * // and the names of the table only."""
    symbols = load_yaml("memory_formulas.yaml")["symbols"]
    return _value(ast.parse(expression, mode="eval").body, {k: int(getattr(run, v)) for k, v in symbols.items()})


def block_num(attn_type: str, run: RunSettings, *, total_len: int, window: int | None, partitions: bool) -> int:
    """Blocks of one pool on one rank, null block included. Raises ValueError for an unknown attn_type."""
    batch, size = run.batch_per_rank, run.block_size
    if attn_type == "SlidingWindow":
        if window is None:
            raise ValueError("a SlidingWindow cache needs a window")
        return batch * ((2 * run.next_n + window + size - 1) // size + 1) + 1
    if attn_type == "FullAttention":
        parts = run.prefill_dp_group if partitions and run.prefill_dp_group > 1 else 1
        return int((total_len + size - 1) / size) * (batch // parts) + 1
    if attn_type == "Mamba":
        return batch * (1 + run.next_n) + 1
    raise ValueError(f"no block formula for attn_type {attn_type!r}")


def itemsize(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by its source text; an expression that is no literal counts as
    bf16.
    """
    return int(load_yaml("memory_formulas.yaml")["itemsize"].get(dtype, 2))


def _offline_expression(tree: SourceTree, name: str, function: str | None = None) -> tuple[str, Span] | None:
    """The offline value of a name, attribute or method, rewritten over the table's symbols.

    The value may be assigned (`self.max_total_len = ...`) or returned by a method of that name, and it may be a call
    of another such method without arguments.
    """
    hits = []
    for file in tree.containing(rf"\b{name}\b"):
        for online, func, stmt in _steps(file):
            if not _gives(stmt, func, name) or (function is not None and func != function):
                continue
            expression = _rewrite(getattr(stmt, "value", None), tree, 0)
            if expression is not None:
                hits.append((online, expression, file.span(stmt)))
    hits.sort(key=lambda h: h[0])  # the offline branch first
    return (hits[0][1], hits[0][2]) if hits else None


def _gives(stmt: ast.stmt, func: str, name: str) -> bool:
    """Whether a statement sets the name, or returns from the method of that name."""
    if isinstance(stmt, ast.Return):
        return func == name
    target = stmt.targets[0] if isinstance(stmt, ast.Assign) else None
    return (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)) == name


def _steps(file: SourceFile) -> Iterator[tuple[bool, str, ast.stmt]]:
    """(runs only online, enclosing function, statement) of every assignment and return."""

    def walk(body: list[ast.stmt], online: bool, func: str) -> Iterator[tuple[bool, str, ast.stmt]]:
        for stmt in body:
            if isinstance(stmt, (ast.Assign, ast.Return)):
                yield online, func, stmt
            elif isinstance(stmt, ast.If):
                yield from walk(stmt.body, online or "online" in ast.unparse(stmt.test), func)
                yield from walk(stmt.orelse, online, func)
            elif isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from walk(stmt.body, online, stmt.name)
            elif isinstance(stmt, (ast.ClassDef, ast.For, ast.With, ast.Try, ast.While)):
                yield from walk(stmt.body, online, func)

    yield from walk(file.tree.body, False, "")


def _rewrite(node: ast.expr | None, tree: SourceTree, depth: int) -> str | None:
    """`self.a + self.b.c * (d + 1)` over the table's names, or None when it holds anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return name if name in load_yaml("memory_formulas.yaml")["symbols"] else None
    if isinstance(node, ast.Call) and not node.args and not node.keywords and depth < 3:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return _returned(tree, name, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)):
        left, right = _rewrite(node.left, tree, depth), _rewrite(node.right, tree, depth)
        sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}[type(node.op)]
        return f"({left} {sign} {right})" if left is not None and right is not None else None
    return None


def _returned(tree: SourceTree, name: str, depth: int) -> str | None:
    """What a method without arguments returns offline; None when several definitions differ."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for file in tree.containing(rf"def\s+{name}\b"):
        for online, func, stmt in _steps(file):
            if isinstance(stmt, ast.Return) and func == name:
                found[online].add(_rewrite(stmt.value, tree, depth) or "")
    offline = found[False]
    return offline.pop() or None if len(offline) == 1 else None


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
    raise ValueError(f"not a length expression: {ast.unparse(node)}")


def _partitions(tree: SourceTree) -> bool:
    """Whether block sizing divides the batch by the offline prefill group: the code that sizes blocks reads it."""
    sizing = tree.containing(r"def\s+calculate_block_num\b")
    folders = {file.path.parent for file in sizing}
    readers = tree.containing(r"\.offline_prefill_dp_group_size\b")
    return any(file.path.parent in folders for file in readers)


def _alignment(tree: SourceTree) -> int:
    """The alignment constant that the allocating file imports, in bytes."""
    for file in tree.containing(r"^HIXL_ALIGNMENT\s*="):
        for stmt in file.tree.body:
            if isinstance(stmt, ast.Assign) and getattr(stmt.targets[0], "id", None) == "HIXL_ALIGNMENT":
                try:
                    return _value(stmt.value, {})
                except ValueError:
                    return 0
    return 0
