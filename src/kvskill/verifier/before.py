"""Where the before-state of a converted model is: saved originals, or the same folder of another repository."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.verifier.discover import ModelUnderTest, find_model

__all__ = ["LegacySource", "find_legacy"]


@dataclass(frozen=True)
class LegacySource:
    """A tree in which the Legacy model can run. `root` None: there is none, and `reason` says why."""

    root: Path | None
    folder: Path | None
    reason: str
    model: ModelUnderTest | None = None


def find_legacy(model: ModelUnderTest, before_repo: Path | None, work: Path) -> LegacySource:
    """The before-state. Raises InputError KV434 when --before-repo has no such model."""
    relative = model.folder.relative_to(model.root)
    if before_repo is not None:
        root = before_repo.resolve()
        if not (root / relative).is_dir():
            raise InputError(
                Diagnostic(
                    "KV434",
                    Severity.ERROR,
                    f"The before-repository has no {relative}.",
                    "Give the tree in which the Legacy model runs.",
                    Span(str(before_repo)),
                )
            )
        before = find_model(root / relative, root)
        if before.has_cache_info:
            return LegacySource(None, None, "the model in the before-repository is Paged already")
        return LegacySource(root, root / relative, f"from {before_repo.name}", before)
    if model.originals is None:
        return LegacySource(None, None, "no originals in .kvskill/originals, and no --before-repo")
    if model.manifest is not None and model.manifest.model.input_era == "padded-2d":
        if model.manifest.target.input_era != "padded-2d":
            return LegacySource(None, None, "the originals are of the padded 2-D era; give their tree: --before-repo")
    root = _overlay(model, model.originals, work / "before")
    return LegacySource(root, root / relative, "saved originals")


def _overlay(model: ModelUnderTest, originals: Path, dest: Path) -> Path:
    """The target tree with the originals in place: links, except for the model's own folder, which is copied."""
    relative = model.folder.relative_to(model.root)
    (dest / relative.parent).mkdir(parents=True)
    for entry in model.root.iterdir():
        if entry.name not in (relative.parts[0], ".git"):
            (dest / entry.name).symlink_to(entry)
    parent = model.root
    here = dest
    for part in relative.parts[:-1]:
        parent, here = parent / part, here / part
        for entry in parent.iterdir():
            if entry.name not in relative.parts and not (here / entry.name).exists():
                (here / entry.name).symlink_to(entry)
    shutil.copytree(model.folder, dest / relative, ignore=shutil.ignore_patterns(".kvskill", "__pycache__"))
    for path in sorted(p for p in originals.rglob("*") if p.is_file()):
        name = path.relative_to(originals)
        if name.is_relative_to(relative):  # kept by repository path
            name = name.relative_to(relative)
        (dest / relative / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, dest / relative / name)
    return dest
