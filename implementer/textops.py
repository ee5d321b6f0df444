"""Statements as text: their lines, their indentation, inserting before, replacing and removing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kvskill.implementer.edits import EditSet
from kvskill.source import SourceFile

__all__ = [
    "block_of",
    "blocks_in",
    "body_start",
    "drop_method",
    "indent_of",
    "insert_after",
    "insert_before",
    "names_read",
    "reindent",
    "remove_statements",
    "replace_expr",
    "replace_statement",
    "statements",
    "wrap_expr",
]

_PARTS = ("body", "orelse", "finalbody")
_DIRECTIVES = tuple(b"#" + space + word for space in (b"", b" ") for word in (b"fmt:", b"type:", b"region", b"endreg"))


def blocks_in(stmt: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a compound statement, those of handlers and cases included; empty ones are left out."""
    if isinstance(stmt, (ast.FunctionDef, ast.ClassDef)):
        return []
    blocks = [getattr(stmt, part, []) for part in _PARTS]
    blocks += [h.body for h in getattr(stmt, "handlers", [])] + [c.body for c in getattr(stmt, "cases", [])]
    return [b for b in blocks if b]


def line_bounds(file: SourceFile, stmt: ast.stmt) -> tuple[int, int] | None:
    """Byte range of the statement's whole lines, or None when it shares a line with other code."""
    start, end = file.byte_range(stmt)
    if isinstance(stmt, (ast.FunctionDef, ast.ClassDef)) and stmt.decorator_list:
        start = file.offset(stmt.decorator_list[0].lineno, 0)
    line_start = (
        file.line_starts[stmt.lineno - 1]
        if not isinstance(stmt, (ast.FunctionDef, ast.ClassDef))
        else _line_start(file, start)
    )
    if file.raw[line_start:start].strip():
        return None
    end_line = stmt.end_lineno or 1
    line_end = file.line_starts[end_line] if end_line < len(file.line_starts) else len(file.raw)
    tail = file.raw[end:line_end].strip()
    if tail and not tail.startswith(b"#"):
        return None
    return line_start, line_end


def _line_start(file: SourceFile, offset: int) -> int:
    return max(s for s in file.line_starts if s <= offset)


def indent_of(file: SourceFile, stmt: ast.stmt) -> str:
    """The white space before the statement, tabs kept."""
    start = file.line_starts[stmt.lineno - 1]
    line = file.raw[start : file.offset(stmt.lineno, stmt.col_offset)].decode(file.encoding)
    return line if not line.strip() else line[: len(line) - len(line.lstrip())]


def reindent(text: str, indent: str, unit: str = "    ") -> str:
    """Indent template text (written with four spaces a level) for a place; blank lines stay empty."""
    out = []
    for line in text.rstrip("\n").split("\n"):
        body = line.lstrip(" ")
        depth = (len(line) - len(body)) // 4
        extra = " " * ((len(line) - len(body)) % 4)
        out.append(indent + unit * depth + extra + body if body else "")
    return "\n".join(out) + "\n"


def indent_unit(file: SourceFile, func: ast.FunctionDef) -> str:
    """One level of indentation as the file writes it."""
    inner = indent_of(file, func.body[0])
    outer = indent_of(file, func)
    return inner[len(outer) :] if inner.startswith(outer) and len(inner) > len(outer) else "    "


def insert_before(edits: EditSet, stmt: ast.stmt, text: str, why: str, unit: str = "    ") -> None:
    """Insert text (unindented) on lines of its own before a statement."""
    file = edits.file
    start = file.line_starts[stmt.lineno - 1]
    edits.add(start, start, reindent(text, indent_of(file, stmt), unit), why)


def insert_after(edits: EditSet, stmt: ast.stmt, text: str, why: str, unit: str = "    ") -> None:
    """Insert text (unindented) on lines of its own after a statement."""
    file = edits.file
    end_line = stmt.end_lineno or stmt.lineno
    if end_line < len(file.line_starts):
        at, lead = file.line_starts[end_line], ""
    else:
        at, lead = len(file.raw), ""
    if at == len(file.raw) and not file.raw.endswith((b"\n", b"\r")):
        lead = "\n"
    edits.add(at, at, lead + reindent(text, indent_of(file, stmt), unit), why)


def replace_expr(edits: EditSet, node: ast.AST, text: str, why: str) -> None:
    """Replace one expression in place."""
    start, end = edits.file.byte_range(node)
    edits.add(start, end, text, why)


def wrap_expr(edits: EditSet, node: ast.AST, before: str, after: str, why: str) -> None:
    """Put text around an expression without touching it; brackets are added where the grammar wants them."""
    start, end = edits.file.byte_range(node)
    tight = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    left, right = (before, after) if tight else (f"{before}(", f"){after}")
    if left:
        edits.add(start, start, left, why)
    edits.add(end, end, right, why)


def replace_statement(edits: EditSet, stmt: ast.stmt, text: str, why: str, unit: str = "    ") -> None:
    """Replace a statement by other lines; a trailing comment on its last line goes with it."""
    bounds = line_bounds(edits.file, stmt)
    if bounds is None:
        start, end = edits.file.byte_range(stmt)
        edits.add(start, end, text.strip(), why)
        return
    edits.add(bounds[0], bounds[1], reindent(text, indent_of(edits.file, stmt), unit), why)


def drop_method(edits: EditSet, func: ast.FunctionDef, why: str) -> bool:
    """Remove a whole function with the blank lines after it; False when it shares a line with other code."""
    file = edits.file
    bounds = line_bounds(file, func)
    if bounds is None:
        return False
    start, end = bounds
    while _blank_at(file, end):
        end = file.raw.index(b"\n", end) + 1
    edits.add(start, end, "", why)
    return True


def statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """All statements of a block, outer before inner, without those of nested functions and classes."""
    for stmt in body:
        yield stmt
        for block in blocks_in(stmt):
            yield from statements(block)


def block_of(func: ast.FunctionDef, stmt: ast.stmt) -> list[ast.stmt]:
    """The block that directly holds a statement."""

    def search(body: list[ast.stmt]) -> list[ast.stmt] | None:
        if stmt in body:
            return body
        for s in body:
            for block in blocks_in(s):
                found = search(block)
                if found is not None:
                    return found
        return None

    return search(func.body) or func.body


def whole_removal(body: list[ast.stmt], removed: set[ast.stmt]) -> set[ast.stmt]:
    """`removed` plus the compound statements that would be left with nothing in them."""
    out = set(removed)

    def visit(stmts: list[ast.stmt]) -> bool:
        """Visit a block; True when nothing of it is left."""
        gone = True
        for stmt in stmts:
            if stmt in out:
                continue
            parts = blocks_in(stmt)
            if isinstance(stmt, (ast.If, ast.With, ast.For, ast.While, ast.Match)) and parts:
                if all([visit(p) for p in parts]):  # noqa: C419 (visits every part)
                    out.add(stmt)
                    continue
            if isinstance(stmt, ast.Pass):
                continue
            gone = False
        return gone

    visit(body)
    return out


def remove_statements(edits: EditSet, func: ast.FunctionDef, removed: set[ast.stmt], why: str) -> set[ast.stmt]:
    """Remove statements; a block left empty goes with its head, one that cannot go gets `pass`.

    Returns everything that went.
    """
    everything = whole_removal(func.body, removed)

    def visit(body: list[ast.stmt]) -> None:
        kept = [s for s in body if s not in everything]
        for i, stmt in enumerate(body):
            if stmt in everything:
                bounds = line_bounds(edits.file, stmt)
                fill = ""
                if not kept and i == 0:
                    fill = indent_of(edits.file, stmt) + "pass\n"
                if bounds is None:
                    start, end = edits.file.byte_range(stmt)
                    edits.add(start, end, "pass", why)
                else:
                    comment = _comment_of(edits.file, body, i, everything)
                    if comment is not None:  # an edit of its own: text may be inserted between it and the statement
                        edits.add(*comment, "", why)
                    edits.add(bounds[0], _past_blank(edits.file, body, i, everything, bounds), fill, why)
                continue
            for block in blocks_in(stmt):
                visit(block)

    visit(func.body)
    return everything


def _comment_of(file: SourceFile, body: list[ast.stmt], i: int, gone: set[ast.stmt]) -> tuple[int, int] | None:
    """The comment lines right above removed statement `i`, where they speak of removed statements only: what follows
    without a blank line goes too.
    """
    last = i
    while last + 1 < len(body) and (following := line_bounds(file, body[last + 1])) is not None:
        mine = line_bounds(file, body[last])
        if mine is None or mine[1] != following[0]:
            break  # a blank line, or another comment
        if body[last + 1] not in gone:
            return None
        last += 1
    bounds = line_bounds(file, body[i])
    if bounds is None:
        return None
    start, indent = bounds[0], indent_of(file, body[i]).encode(file.encoding)
    while start > 0:
        above = file.raw.rfind(b"\n", 0, start - 1) + 1
        line = file.raw[above:start]
        if not line.startswith(indent + b"#") or line[len(indent) :].startswith(_DIRECTIVES):
            break
        start = above
    return (start, bounds[0]) if start < bounds[0] else None


def _past_blank(file: SourceFile, body: list[ast.stmt], i: int, gone: set[ast.stmt], bounds: tuple[int, int]) -> int:
    """End of a removal: it takes the blank lines after it when blank lines, or the block's head, stand before them."""
    end = bounds[1]
    if not _blank_at(file, end) or not _blank_before(file, body, i, gone):
        return end
    while _blank_at(file, end):
        end = file.raw.index(b"\n", end) + 1
    return end


def _blank_before(file: SourceFile, body: list[ast.stmt], i: int, gone: set[ast.stmt]) -> bool:
    """Do blank lines precede statement `i` once the removed statements just before it are gone?"""
    while (bounds := line_bounds(file, body[i])) is not None:
        start = (_comment_of(file, body, i, gone) or bounds)[0]
        if file.raw[:start].endswith((b"\n\n", b"\r\n\r\n", b":\n", b":\r\n")):
            return True
        above = line_bounds(file, body[i - 1]) if i > 0 and body[i - 1] in gone else None
        if above is None or above[1] != start:
            return False  # code that stays, or a comment that does
        i -= 1
    return False


def _blank_at(file: SourceFile, offset: int) -> bool:
    stop = file.raw.find(b"\n", offset)
    return stop >= 0 and not file.raw[offset:stop].strip()


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that are read anywhere below the nodes."""
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def body_start(func: ast.FunctionDef) -> ast.stmt:
    """The first statement after the docstring."""
    first = func.body[0]
    doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return func.body[1] if doc and len(func.body) > 1 else first
