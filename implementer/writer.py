"""The one place that writes the user's files: all of them or none.

Originals are saved first, under `<model>/.kvskill/originals/`, with a journal; each file is replaced by an atomic
rename. If a write fails, everything is put back. If the process is killed in between, the journal says so, and the
next run (or `kvskill undo`) puts the originals back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvskill.diagnostics import Diagnostic, InputError, Refusal, Severity, Span

__all__ = ["Journal", "dirty_files", "read_journal", "undo", "write_all"]

FOLDER = ".kvskill"


@dataclass(frozen=True)
class Journal:
    """What the last apply did. `state` is `writing` until all files stand."""

    state: str
    files: dict[str, dict[str, str]]  # path relative to the model folder -> sha256 before and after


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _error(code: str, fact: str, todo: str, shown: str) -> InputError:
    return InputError(Diagnostic(code, Severity.ERROR, fact, todo, Span(shown)))


def read_journal(model_dir: Path) -> Journal | None:
    """The journal of the last apply, or None. Raises InputError (KV250) when it cannot be read."""
    path = model_dir / FOLDER / "apply.json"
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Journal(str(data["state"]), {str(k): dict(v) for k, v in data["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _error(
            "KV250", f"The journal of the last apply cannot be read ({exc}).", "Restore or delete it.", str(path.name)
        ) from None


def dirty_files(paths: list[Path]) -> list[Path]:
    """Files among `paths` with changes that git does not hold. Outside a git tree nothing is dirty."""
    out = []
    for path in paths:
        try:
            done = subprocess.run(
                ["git", "status", "--porcelain", "--", path.name],
                cwd=path.parent,
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        if done.returncode != 0:
            return []
        if done.stdout.strip():
            out.append(path)
    return out


def write_all(model_dir: Path, files: Mapping[Path, bytes]) -> Journal:
    """Replace the files, all or none. Raises InputError (KV251) when one cannot be written; then nothing changed."""
    folder = model_dir / FOLDER
    originals = folder / "originals"
    entries: dict[str, dict[str, str]] = {}
    previous = read_journal(model_dir)
    keep = previous.files if previous is not None and previous.state == "done" else {}
    try:
        for path, new in files.items():
            rel = path.relative_to(model_dir).as_posix()
            old = path.read_bytes()
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied", str(path))
            entries[rel] = {"before": _sha(old), "after": _sha(new)}
            kept = originals / rel
            kept.parent.mkdir(parents=True, exist_ok=True)
            _atomic(kept, old, None)
        journal = Journal("writing", {**{k: v for k, v in keep.items() if k not in entries}, **entries})
        _save(folder, journal)
    except OSError as exc:
        raise _error(
            "KV251", f"The files cannot be written ({exc.strerror}).", "Check the permissions.", _shown(exc, model_dir)
        ) from None
    done: list[Path] = []
    try:
        for path, new in files.items():
            _atomic(path, new, path)
            done.append(path)
    except OSError as exc:
        for path in done:
            with contextlib.suppress(OSError):
                _atomic(path, (originals / path.relative_to(model_dir)).read_bytes(), path)
        _save(folder, Journal("undone", entries))
        raise _error(
            "KV251",
            f"A file could not be written ({exc.strerror}); all were put back.",
            "Check it.",
            _shown(exc, model_dir),
        ) from None
    journal = Journal("done", journal.files)
    _save(folder, journal)
    return journal


def undo(model_dir: Path, *, force: bool = False) -> list[str]:
    """Put the originals back. Raises Refusal (KV252) for files edited since, unless forced; KV253 without a journal."""
    journal = read_journal(model_dir)
    if journal is None or journal.state == "undone":
        raise _error("KV253", "There is nothing to undo here.", "Run `kvskill apply` first.", model_dir.name)
    originals = model_dir / FOLDER / "originals"
    edited = []
    for rel, sums in journal.files.items():
        path = model_dir / rel
        now = _sha(path.read_bytes()) if path.exists() else ""
        if now not in (sums["after"], sums["before"]):
            edited.append(rel)
    if edited and not force:
        raise Refusal(
            Diagnostic(
                "KV252",
                Severity.BLOCKING,
                f"{', '.join(edited)} changed since the apply.",
                "Save your changes and use --force, or restore by hand from .kvskill/originals.",
                Span(edited[0]),
            )
        )
    back = []
    for rel in journal.files:
        path = model_dir / rel
        _atomic(path, (originals / rel).read_bytes(), path if path.exists() else None)
        back.append(rel)
    _save(model_dir / FOLDER, Journal("undone", journal.files))
    return back


def _shown(exc: OSError, model_dir: Path) -> str:
    name = exc.filename
    if isinstance(name, str):
        path = Path(name)
        return path.relative_to(model_dir).as_posix() if path.is_relative_to(model_dir) else path.name
    return model_dir.name


def _save(folder: Path, journal: Journal) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n", encoding="utf-8")
    text = json.dumps({"state": journal.state, "files": journal.files}, indent=2, sort_keys=True) + "\n"
    _atomic(folder / "apply.json", text.encode(), None)


def _atomic(path: Path, data: bytes, like: Path | None) -> None:
    """Write beside the file, flush to disk, rename over it; the mode of `like` is kept."""
    temp = path.with_name(f".{path.name}.kvskill-tmp")
    try:
        with temp.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        if like is not None:
            shutil.copymode(like, temp)
        temp.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temp.unlink()
