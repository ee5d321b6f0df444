"""What the command line asks `analyze` for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["AnalyzeRequest"]


@dataclass(frozen=True)
class AnalyzeRequest:
    """`model` is a folder, or a name under `models/` of the target repository."""

    model: str
    repo: Path | None = None
    config: Path | None = None
    yaml: str | None = None
    mode: Literal["framework", "standalone"] | None = None
    prompt: str | None = None
    torch_npu: str | None = None
    what_if: str | None = None
    record: bool = False
    write: bool = True
