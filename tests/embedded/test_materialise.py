"""The files that are written: valid in every era, and different where the real API changed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from kvskill.embedded import ERAS, MODELS, materialise

CACHE_INFO = "executor/core/kv_cache/cache_info.py"
METADATA = "executor/utils/forward_metadata.py"


def fields(path: Path, name: str) -> list[str]:
    """Annotated names of a class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


@pytest.mark.parametrize("era", ERAS)
def test_every_file_of_an_era_parses_and_nothing_compiled_is_copied(era: str, trees: Callable[[str], Path]) -> None:
    tree = trees(era)
    files = sorted(tree.rglob("*"))
    assert not [f for f in files if f.name == "__pycache__" or f.suffix == ".pyc"]
    sources = [f for f in files if f.suffix == ".py"]
    assert len(sources) > 25
    for path in sources:
        ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("era", ERAS)
def test_absolute_imports_of_an_era_lead_to_files(era: str, trees: Callable[[str], Path]) -> None:
    tree = trees(era)
    missing = []
    for path in tree.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                parts = node.module.split(".")
                if parts[0] in ("executor", "module", "models"):
                    base = tree.joinpath(*parts)
                    if not base.with_suffix(".py").is_file() and not base.is_dir():
                        missing.append(f"{path.relative_to(tree)}: {node.module}")
    assert missing == []


def test_the_block_size_moved_from_the_model_to_the_entry(trees: Callable[[str], Path]) -> None:
    where = {
        era: (
            "block_size" in fields(trees(era) / CACHE_INFO, "ModelCacheInfo"),
            "block_size" in fields(trees(era) / CACHE_INFO, "CacheEntry"),
        )
        for era in ("2026-04", "2026-06", "2026-08")
    }
    assert where == {"2026-04": (True, False), "2026-06": (False, True), "2026-08": (False, True)}
    assert "manager_key" in fields(trees("2026-06") / CACHE_INFO, "CacheEntry")
    assert "cache_layout" in fields(trees("2026-08") / CACHE_INFO, "CacheEntry")
    assert not (trees("2026-03") / CACHE_INFO).exists()


def test_forward_metadata_grew(trees: Callable[[str], Path]) -> None:
    names = {era: set(fields(trees(era) / METADATA, "ForwardMetaData")) for era in ERAS}
    assert "slot_mapping" not in names["2026-03"]
    assert names["2026-03"] < names["2026-04"] == names["2026-06"] < names["2026-08"]
    assert names["2026-08"] - names["2026-06"] == {"is_warm_up", "cp_metadata"}


def test_groups_are_created_by_the_framework_first_and_registered_by_models_later(
    trees: Callable[[str], Path],
) -> None:
    text = {era: (trees(era) / "executor/core/config/comm_manager.py").read_text(encoding="utf-8") for era in ERAS}
    registers = {era: "def register_group" in text[era] for era in ERAS}
    assert registers == {"2026-03": False, "2026-04": False, "2026-06": True, "2026-08": True}


def test_the_registry_has_the_form_of_the_era(trees: Callable[[str], Path]) -> None:
    eager = (trees("2026-04") / "executor/core/entrypoints/support_models.py").read_text(encoding="utf-8")
    assert '"tiny_dense": (TinyDenseForCausalLM, TinyDenseConfig),' in eager
    lazy = (trees("2026-08") / "executor/core/support_models.py").read_text(encoding="utf-8")
    assert '("models.tiny_dense.models.modeling_tiny_dense", "TinyDenseForCausalLM"),' in lazy
    assert not (trees("2026-08") / "executor/core/entrypoints").exists()


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    first = materialise(tmp_path / "a", "2026-06", ["tiny_dense"])
    before = {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    materialise(first, "2026-06", ["tiny_dense"])
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == before


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown era"):
        materialise(tmp_path, "2025-01")
    with pytest.raises(ValueError, match="unknown model"):
        materialise(tmp_path, "2026-04", ["no_such_model"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MODELS)
def test_models_have_no_init_file_and_a_config(name: str, trees: Callable[[str], Path]) -> None:
    folder = trees("2026-03" if MODELS[name].era == "2026-03" else "2026-04") / "models" / name
    assert (folder / "config.json").is_file()
    assert (folder / "config" / f"{name}.yaml").is_file()
    assert not (folder / "models" / "__init__.py").exists()
