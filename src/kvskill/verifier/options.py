"""What a verification is asked to do: one frozen value, read by every part of the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["DEFAULT_PROMPTS", "Limits", "VerifyOptions"]

Against = Literal["legacy", "hf", "both"]
Backend = Literal["auto", "npu", "wheel", "table"]
Dtype = Literal["fp32", "bf16"]

DEFAULT_PROMPTS = (5, 1, 3, 17)


@dataclass(frozen=True)
class Limits:
    """What one child process may use. `memory_mb` bounds private memory (data segment), `seconds` wall time."""

    seconds: float = 600.0
    memory_mb: int = 12_000


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `kvskill verify`. Lengths in tokens.

    `prompts` None means the default lengths, plus a longer one where the model has a sliding window.
    `batch_size` is the number of request slots; prompts beyond it wait for the next wave, so blocks are reused.
    """

    model: Path
    repo: Path | None = None
    before_repo: Path | None = None
    config: Path | None = None
    against: Against = "both"
    backend: Backend = "auto"
    dtype: Dtype = "fp32"
    python: str | None = None
    prompts: tuple[int, ...] | None = None
    decode_steps: int = 24
    block_size: int = 16
    batch_size: int = 3
    long: bool = False
    seed: int = 20260428
    tp: int = 1
    mtp: int = 0
    tolerance: float | None = None
    waive: tuple[str, ...] = ()
    checks: bool = True
    limits: Limits = Limits()
    keep: Path | None = None
