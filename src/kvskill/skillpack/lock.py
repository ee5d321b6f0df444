"""The record of an installed skill: which files are ours, what they were, and for whom they are there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["BACKUP_NAME", "LOCK_NAME", "Lock", "digest", "read_lock"]

LOCK_NAME = ".kvskill-lock.json"
BACKUP_NAME = ".kvskill-backup"  # + number + .zip
_SCHEMA = 1


@dataclass(frozen=True)
class Lock:
    """Paths are POSIX and relative to the base folder.

    `files`: path -> sha256 of what was installed. `created_dirs`: folders that did not exist before.
    `foreign`: files of somebody else that --force replaced -> the backup they are in (restored on uninstall).
    `edited`: backups that hold edits of our own files; they outlive the skill.
    Backups lie in the skill folder.
    """

    version: str
    clients: tuple[str, ...]
    files: dict[str, str]
    created_dirs: tuple[str, ...] = ()
    foreign: dict[str, str] = field(default_factory=dict)
    edited: tuple[str, ...] = ()

    def dump(self) -> bytes:
        """JSON with sorted keys; equal locks give equal bytes."""
        data = {
            "schema": _SCHEMA,
            "package": "kvskill",
            "version": self.version,
            "clients": sorted(self.clients),
            "files": self.files,
            "created_dirs": sorted(self.created_dirs),
            "foreign": self.foreign,
            "edited": sorted(self.edited),
        }
        return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def digest(content: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(content).hexdigest()


def read_lock(path: Path) -> Lock | None:
    """The lock, or None when there is none. Raises InputError (KV094) when it cannot be understood."""
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        lock = Lock(
            str(data["version"]),
            tuple(data["clients"]),
            {str(k): str(v) for k, v in data["files"].items()},
            tuple(data["created_dirs"]),
            {str(k): str(v) for k, v in data["foreign"].items()},
            tuple(data["edited"]),
        )
        paths = [*lock.files, *lock.created_dirs, *lock.foreign, *lock.foreign.values(), *lock.edited]
        if any(p.startswith("/") or ".." in p.split("/") for p in paths):
            raise ValueError("a path leaves the folder")
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise InputError(
            Diagnostic(
                "KV094",
                Severity.ERROR,
                f"The record of the installed skill cannot be read ({exc}).",
                "Remove the skill folder by hand, then install again.",
                Span(str(path)),
            )
        ) from None
    return lock
