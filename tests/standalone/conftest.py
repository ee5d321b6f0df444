"""A standalone model folder, copied from a case, analyzed and converted without running anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvskill.analyzer.request import AnalyzeRequest
from kvskill.analyzer.run import Analysis, analyze
from kvskill.implementer.apply import Applied, ApplyRequest, apply

ROOT = Path(__file__).resolve().parents[2]
CASES = (ROOT / "tests" / "cases_standalone", ROOT / "src" / "kvskill" / "embedded" / "runners")


@dataclass
class Folder:
    """A copy of a case's model folder."""

    model: Path
    config: Path

    def replace(self, name: str, old: str, new: str) -> None:
        """Change the source; the text must be there."""
        path = self.model / name
        text = path.read_text(encoding="utf-8")
        assert old in text, old
        path.write_text(text.replace(old, new), encoding="utf-8")

    def analyze(self) -> Analysis:
        return analyze(AnalyzeRequest(model=str(self.model), config=self.config))

    def apply(self) -> Applied:
        return apply(ApplyRequest(str(self.model), config=self.config, force=True))

    def convert(self) -> Applied:
        self.analyze()
        return self.apply()

    def sources(self) -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in sorted(self.model.rglob("*.py")) if ".kvskill" not in p.parts}


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], Folder]:
    def make(name: str) -> Folder:
        source = next(base / name for base in CASES if (base / name).is_dir())
        folder = next(p for p in source.iterdir() if p.is_dir())
        shutil.copytree(folder, tmp_path / "models" / folder.name)
        return Folder(tmp_path / "models" / folder.name, source / "config.json")

    return make
