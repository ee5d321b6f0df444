"""A model of one file in an embedded target, converted without running anything."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvskill.analyzer.request import AnalyzeRequest
from kvskill.analyzer.run import analyze
from kvskill.embedded import materialise
from kvskill.implementer.apply import Applied, ApplyRequest, apply

SUPPORT = Path(__file__).resolve().parents[1] / "cases_support" / "loader.py"


def load_support() -> ModuleType:
    """tests/cases_support/loader.py, which is no package."""
    name = "cases_loader"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SUPPORT)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@dataclass
class Bench:
    """A target tree with one model in it."""

    tree: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.tree / "models" / self.name

    @property
    def modeling(self) -> Path:
        return next(iter(sorted((self.folder / "models").glob("modeling_*.py"))))

    def edit(self, old: str, new: str, count: int = 1) -> None:
        """Replace text of the modeling file; it must be there."""
        raw = self.modeling.read_bytes().decode("utf-8")
        assert raw.count(old) >= 1, f"{old!r} is not in the model"
        self.modeling.write_bytes(raw.replace(old, new, count).encode("utf-8"))

    def analyze(self) -> Any:
        config = next(self.folder.rglob("config.json"))
        return analyze(AnalyzeRequest(model=self.name, repo=self.tree, config=config))

    def apply(self, **options: Any) -> Applied:
        return apply(ApplyRequest(self.name, self.tree, **options))

    def convert(self) -> str:
        """analyze and apply; the new modeling text."""
        self.analyze()
        assert self.apply().status == "converted"
        return self.modeling.read_bytes().decode("utf-8")


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(model: str = "tiny_dense", era: Any = "2026-04") -> Bench:
        tree = tmp_path / "target"
        materialise(tree, era, models=[model])
        return Bench(tree, model)

    return make


@pytest.fixture
def case_bench(tmp_path: Path) -> Callable[..., Bench]:
    def make(name: str, era: Any = "2026-04") -> Bench:
        tree = tmp_path / "target"
        materialise(tree, era, models=[])
        case = load_support().load_case(load_support().CASES / name)
        shutil.copytree(case.model_dir, tree / "models" / name)
        config = json.loads((case.path / "config.json").read_text(encoding="utf-8"))
        (tree / "models" / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return Bench(tree, name)

    return make
