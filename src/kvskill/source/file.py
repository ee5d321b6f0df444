"""One Python source file: bytes, text, syntax tree, and the way from a node to a place.

Facts are read with the standard library's `ast`: it is the grammar that will run the file, its nodes carry
exact byte positions, and it costs no import time. Writing goes through byte-range edits (implementer/edits.py),
so every byte outside an edit stays as it was, line ends included.
"""

from __future__ import annotations

import ast
import tokenize
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["SourceFile", "read_source"]

MAX_SOURCE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class SourceFile:
    """A parsed file. `shown` is the path that findings print (relative to the repository)."""

    path: Path
    shown: str
    raw: bytes
    encoding: str
    tree: ast.Module = field(repr=False, compare=False)

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        """Byte offset in `raw` of each line (0-based index)."""
        starts, pos = [0], 0
        for line in self.raw.splitlines(keepends=True):  # LF, CRLF and lone CR, as Python counts them
            pos += len(line)
            starts.append(pos)
        return tuple(starts)

    @cached_property
    def newline(self) -> str:
        """The line end most lines use."""
        crlf = self.raw.count(b"\r\n")
        return "\r\n" if crlf * 2 > self.raw.count(b"\n") else "\n"

    def offset(self, line: int, utf8_col: int) -> int:
        """Byte offset of an `ast` position (1-based line, 0-based UTF-8 column)."""
        start = self.line_starts[line - 1]
        if self.encoding in ("utf-8", "utf-8-sig", "ascii"):
            bom = 3 if line == 1 and self.raw.startswith(b"\xef\xbb\xbf") else 0
            return start + bom + utf8_col
        text = self.raw[start : self.line_starts[line]].decode(self.encoding)
        return start + len(text.encode("utf-8")[:utf8_col].decode("utf-8").encode(self.encoding))

    def byte_range(self, node: ast.AST) -> tuple[int, int]:
        """(start, end) byte offsets of a node that has a position."""
        return (
            self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def segment(self, node: ast.AST) -> str:
        """Source text of a node."""
        start, end = self.byte_range(node)
        return self.raw[start:end].decode(self.encoding)

    def span(self, node: ast.AST) -> Span:
        """Where a node stands, for findings."""
        line = getattr(node, "lineno", 1)
        if not hasattr(node, "lineno"):
            return Span(self.shown)
        return Span(
            self.shown,
            line,
            self._char_col(line, node.col_offset),  # type: ignore[attr-defined]
            node.end_lineno,  # type: ignore[attr-defined]
            self._char_col(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def _char_col(self, line: int, utf8_col: int) -> int:
        start = self.line_starts[line - 1]
        text = self.raw[start : self.line_starts[line]].decode(self.encoding, errors="replace")
        return len(text.encode("utf-8")[:utf8_col].decode("utf-8", errors="replace")) + 1


def read_source(path: Path, shown: str | None = None) -> SourceFile:
    """Read and parse one Python file.

    Raises InputError (KV001 unreadable, KV002 encoding, KV003 syntax) with a place.
    """
    shown = shown or path.name
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise InputError(
                _err("KV001", f"The file is larger than {MAX_SOURCE_BYTES} bytes.", "Split it.", shown)
            )
        raw = path.read_bytes()
    except OSError as exc:
        fact = f"The file cannot be read ({exc.strerror})."
        raise InputError(_err("KV001", fact, "Check the path and its permissions.", shown)) from None
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(raw).readline)
        raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as exc:
        fact = f"The file is not text in its declared encoding ({exc})."
        raise InputError(_err("KV002", fact, "Save it as UTF-8.", shown)) from None
    try:
        tree = ast.parse(raw, filename=shown)
    except SyntaxError as exc:
        raise InputError(
            Diagnostic(
                "KV003",
                Severity.ERROR,
                f"The file is not valid Python ({exc.msg}).",
                "Fix the syntax; nothing was changed.",
                Span(shown, exc.lineno or 1, (exc.offset or 1) or 1),
            )
        ) from None
    except (ValueError, RecursionError, MemoryError) as exc:
        fact = f"The file cannot be parsed ({str(exc) or type(exc).__name__})."
        raise InputError(_err("KV003", fact, "Simplify or split the file.", shown)) from None
    return SourceFile(path, shown, raw, encoding, tree)


def _err(code: str, fact: str, todo: str, shown: str) -> Diagnostic:
    return Diagnostic(code, Severity.ERROR, fact, todo, Span(shown))
