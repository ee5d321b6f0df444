"""The clients that load skills, read from `data/agent_clients.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span

__all__ = ["Client", "Scope", "base_folder", "client_names", "load_client"]

Scope = Literal["project", "user"]


@dataclass(frozen=True)
class Client:
    """Folders of one client for one scope, POSIX and relative to the base folder; `roles` may be missing."""

    name: str
    title: str
    skills: str
    roles: str | None
    role_fields: tuple[str, ...] = ()
    role_extra: dict[str, str] = field(default_factory=dict)


def _data() -> dict[str, Any]:
    text = resources.files("kvskill").joinpath("data/agent_clients.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)["clients"]
    return data


def client_names() -> tuple[str, ...]:
    """All client names, in the order of the data file."""
    return tuple(_data())


def load_client(name: str, scope: Scope) -> Client:
    """The folders of a client; raises KeyError for an unknown one."""
    row = _data()[name]
    return Client(
        name,
        row["title"],
        row[scope]["skills"],
        row[scope]["roles"],
        tuple(row["role_fields"]),
        dict(row.get("role_extra", {})),
    )


def base_folder(scope: Scope, project: Path) -> Path:
    """The folder that a client's paths are relative to. Raises InputError (KV090) when it does not exist."""
    base = Path.home() if scope == "user" else project
    if not base.is_dir():
        what = "home directory" if scope == "user" else "project folder"
        raise InputError(
            Diagnostic(
                "KV090",
                Severity.ERROR,
                f"The {what} {base} does not exist.",
                "Set HOME." if scope == "user" else "Give an existing folder with --dir.",
                Span(str(base)),
            )
        )
    return base.resolve()
