"""The embedded target repository, one folder per API era, made once per test run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvskill.embedded import ERAS, MODELS, materialise

PADDED = "2026-03"
PAGED_ERAS = [era for era in ERAS if era != PADDED]


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """era -> repository with every model that runs in it."""
    made: dict[str, Path] = {}

    def tree(era: str) -> Path:
        if era not in made:
            names = [m.name for m in MODELS.values() if (m.era == PADDED) == (era == PADDED)]
            made[era] = materialise(tmp_path_factory.mktemp("target") / era, era, names)
        return made[era]

    return tree


@pytest.fixture
def executor(
    trees: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], ModuleType]]:
    """(era, module below executor) -> the imported module; every `executor` module is dropped afterwards."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "npu", SimpleNamespace(mem_get_info=lambda: (1 << 40, 1 << 40)), raising=False)
    _forget()

    def load(era: str, name: str) -> ModuleType:
        tree = trees(era)
        if str(tree) not in sys.path:
            monkeypatch.syspath_prepend(str(tree))
            core = ModuleType("executor.core")  # its own __init__ imports the engine, which needs torch_npu
            core.__path__ = [str(tree / "executor" / "core")]
            sys.modules["executor.core"] = core
        return importlib.import_module(f"executor.{name}")

    yield load
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name == "executor" or name.startswith("executor.")]:
        del sys.modules[name]
