"""Chooses and installs a backend. Imports torch only inside `install`."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Literal, cast

from kvskill.verifier.backend.context import OpContext, set_context

__all__ = ["BackendError", "BackendInfo", "BackendKind", "install", "installed"]

BackendKind = Literal["auto", "npu", "wheel", "table"]


class BackendError(RuntimeError):
    """A backend cannot be used here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class BackendInfo:
    """What serves the operators in this process. `torch_npu` is the release whose schemas are in force."""

    kind: Literal["npu", "wheel", "table"]
    torch: str
    torch_npu: str
    profile: str
    soc: str | None = None
    cann: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dict for ledgers and reports."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self.__dict__.items() if v is not None}


_installed: BackendInfo | None = None


def installed() -> BackendInfo | None:
    """What `install` has put in place in this process, or None."""
    return _installed


def install(kind: BackendKind = "auto", *, context: OpContext, release: str | None = None) -> BackendInfo:
    """Make `torch_npu` calls work in this process; returns what serves them.

    `release` names the torch_npu release of the table backend. Raises BackendError when `kind` cannot be used
    (for "auto": when not even the table can), or when another kind is installed already.
    """
    global _installed
    if _installed is not None:
        if kind not in ("auto", _installed.kind) or release not in (None, _installed.torch_npu):
            raise BackendError(f"backend {_installed.kind!r} is installed in this process; start another process")
        set_context(context)
        return _installed
    # an installed torch_npu loads itself with torch and fails where CANN is missing
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    notes: list[str] = []
    order = ("npu", "wheel", "table") if kind == "auto" else (kind,)
    for name in order:
        backend = importlib.import_module(f"kvskill.verifier.backend.{name}")
        try:
            if kind == "auto" and name != "table" and release is not None:
                raise BackendError(f"release {release} was asked for, which only the table can promise")
            found: dict[str, Any] = backend.install_backend(release)
        except BackendError as error:
            if kind != "auto" or name == order[-1]:
                raise
            notes.append(f"{name}: {error}")
            continue
        set_context(context)
        found["notes"] = (*notes, *found.get("notes", ()))
        _installed = BackendInfo(kind=cast(Any, name), profile=context.profile, **found)
        return _installed
    raise BackendError("no backend could be installed")  # unreachable: the last one raised or returned
