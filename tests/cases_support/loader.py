"""The case folders of tests/cases, read into facts. Needs PyYAML only (no torch).

    for case in load_cases():
        case.name, case.expect, case.model_dir, case.tp, ...

See tests/cases/README.md for the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["CASES", "Case", "Legacy", "load_case", "load_cases"]

CASES = Path(__file__).resolve().parents[1] / "cases"
EXPECTATIONS = ("convert", "refuse", "legacy-keep")
KNOWN = {"expect", "ground", "hf_architecture", "tp", "long", "idioms", "legacy"}


@dataclass(frozen=True)
class Legacy:
    """What the Legacy form itself computes.

    right_until: first position (0-based) whose logits may differ from transformers, None when all agree.
    min_prompt: shortest prompt that the check runs; 2 unless stated, because BSH attention calls and phase
        tests by shape make a prompt of one token illegal in Legacy code.
    """

    right_until: int | None
    min_prompt: int
    why: str


@dataclass(frozen=True)
class Case:
    name: str
    path: Path
    expect: str
    ground: str | None
    hf_architecture: str
    tp: tuple[int, ...]
    long: bool
    idioms: tuple[str, ...]
    legacy: Legacy

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def model_dir(self) -> Path:
        """The folder to put under `models/` of a target tree."""
        return self.path / "models" / self.name

    @property
    def modeling(self) -> Path:
        return self.model_dir / "models" / f"modeling_{self.name}.py"

    @property
    def configuration(self) -> Path:
        return self.model_dir / "models" / f"configuration_{self.name}.py"

    @property
    def yaml_files(self) -> tuple[Path, ...]:
        """The run settings; the one named after the case first."""
        files = sorted((self.model_dir / "config").glob("*.yaml"))
        return tuple(sorted(files, key=lambda file: file.stem != self.name))


def load_case(path: Path) -> Case:
    """One folder. ValueError names the folder and what is wrong with its case.yaml."""
    raw: dict[str, Any] = yaml.safe_load((path / "case.yaml").read_text(encoding="utf-8"))
    unknown = set(raw) - KNOWN
    if unknown:
        raise ValueError(f"{path.name}: unknown keys {sorted(unknown)}")
    if raw["expect"] not in EXPECTATIONS:
        raise ValueError(f"{path.name}: expect is one of {EXPECTATIONS}")
    if (raw["expect"] != "convert") != bool(raw.get("ground")):
        raise ValueError(f"{path.name}: a ground belongs to refuse and legacy-keep, and to nothing else")
    legacy = raw.get("legacy") or {}
    return Case(
        name=path.name,
        path=path,
        expect=raw["expect"],
        ground=raw.get("ground"),
        hf_architecture=raw["hf_architecture"],
        tp=tuple(raw.get("tp", [1])),
        long=bool(raw.get("long", False)),
        idioms=tuple(raw.get("idioms", [])),
        legacy=Legacy(legacy.get("right_until"), int(legacy.get("min_prompt", 2)), legacy.get("why", "")),
    )


def load_cases(names: tuple[str, ...] = (), root: Path = CASES) -> list[Case]:
    """All cases in name order, or the named ones. An unknown name raises FileNotFoundError."""
    folders = [root / name for name in names] or sorted(p.parent for p in root.glob("*/case.yaml"))
    return [load_case(folder) for folder in folders]
