"""What source text looks like changes nothing: neither the outcome nor, except for names, the new code."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvskill.analyzer.request import AnalyzeRequest
from kvskill.analyzer.run import analyze
from kvskill.diagnostics import Refusal
from kvskill.embedded import materialise
from kvskill.implementer.apply import ApplyRequest, apply

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "cases"
NAMES = sorted(p.parent.name for p in CASES.glob("*/case.yaml"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutate = load(HERE / "mutate.py")
Convert = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """(outcome, new source) of a case after a mutation: `converted`, or the codes that refuse it."""
    tree = tmp_path_factory.mktemp("property") / "target"
    materialise(tree, "2026-04", models=[])

    @cache
    def run(name: str, mutation: Callable[[str], str] | None = None) -> tuple[str, str]:
        folder = tree / "models" / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(CASES / name / "models" / name, folder)
        shutil.copy(CASES / name / "config.json", folder / "config.json")
        modeling = next((folder / "models").glob("modeling_*.py"))
        old = modeling.read_text(encoding="utf-8")
        if mutation is not None:
            new = mutation(old)
            assert new != old
            assert mutate.canonical(new) == mutate.canonical(old), "the mutation itself changes the program"
            modeling.write_bytes(new.encode("utf-8"))
        try:
            analyze(AnalyzeRequest(model=name, repo=tree, config=folder / "config.json"))
            outcome = str(apply(ApplyRequest(name, tree)).status)
        except Refusal as refusal:
            outcome = " ".join(sorted({f.code for f in refusal.findings}))
        text = modeling.read_bytes().decode("utf-8")
        shutil.rmtree(folder)
        return outcome, text

    return run


def same(convert: Convert, name: str, mutation: Any) -> None:
    want, before = convert(name)
    outcome, after = convert(name, mutation)
    assert outcome == want
    assert mutate.canonical(after).splitlines() == mutate.canonical(before).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_all_mutations_at_once(convert: Convert, name: str) -> None:
    same(convert, name, mutate.everything)


@pytest.mark.parametrize("mutation", sorted(mutate.MUTATIONS))
def test_one_mutation(convert: Convert, mutation: str) -> None:
    same(convert, "gptoss", mutate.MUTATIONS[mutation])


def test_the_comparison_sees_a_change() -> None:
    """The canonical form still tells programs apart."""
    text = "import torch\n\n\ndef f(a):\n    b = a + 1\n    c = b * a\n    return b\n"
    assert mutate.canonical(mutate.everything(text)) == mutate.canonical(text)
    for old, new in (("return b", "return c"), ("a + 1", "a + 2"), ("b * a", "b * b"), ("import torch", "import math")):
        assert mutate.canonical(text.replace(old, new)) != mutate.canonical(text)
