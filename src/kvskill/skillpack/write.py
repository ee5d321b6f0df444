"""Writes below one base folder: new files are staged beside their target, then moved into place."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["Writer"]

_STAGE = ".kvskill-new"


class Writer:
    """File operations of one plan. `skill` is the skill folder relative to `base`."""

    def __init__(self, base: Path, skill: str) -> None:
        self._base = base
        self._skill = base / skill

    def write(self, files: dict[str, bytes]) -> None:
        """Write all files or none. Raises InputError (KV090)."""
        staged: list[tuple[Path, Path]] = []
        made: list[Path] = []
        target = self._base
        try:
            for relative, content in files.items():
                target = self._base / relative
                made += self._make_folders(target.parent)
                stage = target.with_name(target.name + _STAGE)
                stage.write_bytes(content)
                staged.append((stage, target))
            for _, target in staged:
                if target.is_dir():
                    raise IsADirectoryError(0, "is a folder", str(target))
            for stage, target in staged:
                stage.replace(target)
        except OSError as exc:
            for stage, _ in staged:
                stage.unlink(missing_ok=True)
            for folder in reversed(made):
                folder.rmdir()
            raise self._unwritable(target, exc) from None

    def _make_folders(self, folder: Path) -> list[Path]:
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        missing.reverse()
        for path in missing:
            path.mkdir()
        return missing

    def save(self, paths: Iterable[str], name: str) -> None:
        """Put files into a new backup of that name in the skill folder."""
        target = self._skill / name
        try:
            self._make_folders(target.parent)
            with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as backup:
                for relative in paths:
                    source = self._base / relative
                    info = zipfile.ZipInfo(relative)
                    info.external_attr = (stat.S_IMODE(source.stat().st_mode) | stat.S_IFREG) << 16
                    backup.writestr(info, source.read_bytes())
        except OSError as exc:
            raise self._unwritable(target, exc) from None

    def restore(self, files: dict[str, str]) -> None:
        """Take files (path -> backup name) out of the backups again, with their permissions."""
        for relative, name in files.items():
            target = self._base / relative
            with zipfile.ZipFile(self._skill / name) as backup:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(backup.read(relative))
                target.chmod(stat.S_IMODE(backup.getinfo(relative).external_attr >> 16))

    def remove(self, paths: Iterable[str]) -> None:
        """Delete files that are there. Raises InputError (KV090)."""
        for relative in paths:
            target = self._base / relative
            try:
                target.unlink(missing_ok=True)
            except OSError as exc:
                raise self._unwritable(target, exc) from None

    def remove_empty(self, folders: Iterable[str]) -> None:
        """Delete the folders that are empty, deepest first."""
        for relative in sorted(folders, key=lambda p: p.count("/"), reverse=True):
            folder = self._base / relative
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _unwritable(self, path: Path, exc: OSError) -> InputError:
        reason = exc.strerror or str(exc)
        return InputError(
            Diagnostic(
                "KV090",
                Severity.ERROR,
                f"{path} cannot be written ({reason}).",
                "Make the folder writable or install into another one.",
                Span(str(path)),
            )
        )
