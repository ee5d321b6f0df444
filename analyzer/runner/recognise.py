"""Which of the KV modes a standalone model is in: contiguous, paged by hand, with or without a latent cache."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvskill.analyzer.runner.calls import attends, latent_write
from kvskill.analyzer.runner.files import folder_files, leaf
from kvskill.analyzer.runner.hazards import find_hazards
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.source import SourceFile

__all__ = ["Recognised", "recognise"]

Mode = Literal["contiguous", "paged", "none"]


@dataclass(frozen=True)
class Recognised:
    """`mode` contiguous is the seed's mode one, paged its mode two; `latent` adds mode three on top of either."""

    mode: Mode
    latent: bool
    metadata: Literal["arguments", "dicts", "object"]
    where: Span | None
    findings: tuple[Diagnostic, ...] = ()

    @property
    def title(self) -> str:
        """For people: the seed's names of the modes."""
        name = {"contiguous": "mode one (contiguous)", "paged": "mode two (paged by hand)", "none": "no KV cache found"}
        return name[self.mode] + (" with mode three (MLA compressed)" if self.latent else "")


def recognise(model_dir: Path, root: Path) -> Recognised:
    """Read all files of a model folder and say how it keeps its cache. Never raises on the code's form."""
    files = folder_files(model_dir, root)
    calls = attends(files)
    written = latent_write(files)
    latent = written is not None or any("query_rope" in a.args for a in calls)
    paged = [a for a in calls if a.paged]
    if paged:
        first = paged[0]
        where = first.inside.file.span(first.call)
        found = Recognised("paged", latent, _metadata(files), where)
        return Recognised("paged", latent, found.metadata, where, (_note(found), *find_hazards(files)))
    write = _row_write(files)
    if write is None and written is None:
        return Recognised("none", False, "arguments", None)
    file, node = write if write is not None else written  # type: ignore[misc]
    return Recognised("contiguous", latent, _metadata(files), file.span(node))


def _note(found: Recognised) -> Diagnostic:
    assert found.where is not None
    how = {"arguments": "arguments", "dicts": "plain dicts", "object": "a metadata object"}[found.metadata]
    return Diagnostic(
        "KV280",
        Severity.NOTE,
        f"The cache is already in {found.title}; slots and block table travel as {how}.",
        "Nothing to convert; look at the hazards below.",
        found.where,
    )


def _row_write(files: tuple[SourceFile, ...]) -> tuple[SourceFile, ast.AST] | None:
    """The first write of a cache by row: scatter_update_, or an item write whose index is a length."""
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and leaf(node.func) in ("scatter_update_", "scatter_update"):
                return file, node
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                index = node.targets[0].slice
                if any(isinstance(n, ast.Name) and "kv_len" in n.id for n in ast.walk(index)):
                    return file, node
    return None


def _metadata(files: tuple[SourceFile, ...]) -> Literal["arguments", "dicts", "object"]:
    """How slots and tables reach the attention."""
    form: Literal["arguments", "dicts", "object"] = "arguments"
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                if node.slice.value in ("slot_mapping", "block_table"):
                    return "dicts"
            if isinstance(node, ast.Subscript) and leaf(node.value) in ("slot_mapping", "block_table"):
                if isinstance(node.slice, (ast.Constant, ast.Attribute)) and not isinstance(
                    getattr(node.slice, "value", None), int
                ):
                    return "dicts"
            if isinstance(node, ast.Attribute) and node.attr in ("slot_mapping", "block_table"):
                if isinstance(node.value, ast.Name) and node.value.id != "self" and isinstance(node.ctx, ast.Load):
                    form = "object"
    return form
