"""The metadata dataclass and the cache class, inlined in the file that allocates the caches."""

from __future__ import annotations

import ast

from kvskill.implementer.framework.context import Context
from kvskill.implementer.render import render
from kvskill.implementer.standalone.graph import marks_static
from kvskill.implementer.textops import line_bounds
from kvskill.source import SourceFile

__all__ = ["helper_names", "insert_helpers"]


def helper_names(file: SourceFile) -> tuple[str, str]:
    """(metadata class, cache class): names that the file does not use."""
    taken = {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name)}
    taken |= {n.name for n in ast.walk(file.tree) if isinstance(n, (ast.ClassDef, ast.FunctionDef))}
    taken |= {a.asname or a.name for n in ast.walk(file.tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    meta = "ForwardMetaData" if "ForwardMetaData" not in taken else "PagedStepMetaData"
    return meta, "PagedKVCache"


def insert_helpers(ctx: Context, file: SourceFile, right_only: bool) -> bool:
    """Insert the two classes before the first class or function, and the dataclass import.

    `right_only`: the model counts rotary positions by column, so left padding must be an error.
    """
    torch = _torch(file)
    if torch is None:
        ctx.refuse(file, file.tree, "KV201", "The file does not import torch by name.", "Add `import torch`.")
        return False
    meta, cache = helper_names(file)
    body = file.tree.body
    first = next(s for s in body if isinstance(s, (ast.ClassDef, ast.FunctionDef)))
    imports = [s for s in body if isinstance(s, (ast.Import, ast.ImportFrom)) and s.lineno < first.lineno]
    bounds, after = line_bounds(file, first), line_bounds(file, imports[-1])
    if bounds is None or after is None:
        ctx.refuse(file, first, "KV290", "A definition shares its line with other code.", "Give it its own line.")
        return False
    edits = ctx.edit_set(file)
    start = _above_comments(file, bounds[0])
    static = marks_static(ctx)
    text = render("standalone/paged_kv", meta=meta, cache=cache, torch=torch, right_only=right_only, static=static)
    edits.add(start, start, text + "\n\n", "metadata and block table of the paged cache")
    if not _has_dataclass(file):
        plain = [s for s in imports if not (isinstance(s, ast.ImportFrom) and s.module == "__future__")]
        at = line_bounds(file, plain[0]) if plain else after
        assert at is not None
        edits.add(at[0], at[0], "from dataclasses import dataclass\n", "import of the metadata class")
    return True


def _above_comments(file: SourceFile, offset: int) -> int:
    """The comment block that belongs to a definition stays with it."""
    starts = [s for s in file.line_starts if s < offset]
    while starts:
        line = file.raw[starts[-1] : offset]
        if not line.lstrip().startswith(b"#") or line.count(b"\n") != 1:
            break
        offset = starts.pop()
    return offset


def _torch(file: SourceFile) -> str | None:
    for stmt in ast.walk(file.tree):
        if isinstance(stmt, ast.Import):
            for alias in stmt.names:
                if alias.name == "torch":
                    return alias.asname or "torch"
    return None


def _has_dataclass(file: SourceFile) -> bool:
    return any(
        isinstance(s, ast.ImportFrom)
        and s.module == "dataclasses"
        and any(a.name == "dataclass" and a.asname is None for a in s.names)
        for s in file.tree.body
    )
