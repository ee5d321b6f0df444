"""The target probe: API eras of the embedded target, and classes wherever they live."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvskill.analyzer.target import newest_profile, probe, probe_target
from kvskill.diagnostics import InputError, Severity
from kvskill.embedded import materialise

ERAS = {
    "2026-03": {
        "paged": False,
        "block_size_on": "entry",
        "registers_groups": False,
        "input_era": "padded-2d",
        "lazy": False,
    },
    "2026-04": {
        "paged": True,
        "block_size_on": "model",
        "registers_groups": False,
        "input_era": "packed-1d",
        "lazy": False,
    },
    "2026-06": {
        "paged": True,
        "block_size_on": "entry",
        "registers_groups": True,
        "input_era": "packed-1d",
        "lazy": True,
    },
    "2026-08": {
        "paged": True,
        "block_size_on": "entry",
        "registers_groups": True,
        "input_era": "packed-1d",
        "lazy": True,
    },
}


@pytest.mark.parametrize("era", list(ERAS))
def test_eras_are_told_apart(era: str, tmp_path: Path) -> None:
    repo = materialise(tmp_path / "repo", era)
    profile = probe(repo, use_installed=False).profile
    expected = dict(ERAS[era])
    lazy = expected.pop("lazy")
    assert {k: getattr(profile, k) for k in expected} == expected
    assert profile.found and ("(lazy)" in (profile.registration or "")) is lazy
    assert ("scheduler_config" in profile.config_fields) and (
        "block_size" in profile.config_fields["scheduler_config"]
    ) is (era != "2026-03")
    assert ("manager_key" in profile.cache_entry_fields) is (era in ("2026-06", "2026-08"))
    assert profile.mamba_cache_entry is (era == "2026-08")
    assert ("Mamba" in profile.attn_types) is (era == "2026-08")
    assert ("is_warm_up" in profile.forward_metadata_fields) is (era == "2026-08")


def test_registry_names_the_models_of_a_folder(tmp_path: Path) -> None:
    for era in ("2026-04", "2026-08"):
        result = probe(materialise(tmp_path / era, era), use_installed=False)
        assert [m.key for m in result.registry.for_folder("models/tiny_dense")] == ["tiny_dense"]
        assert result.registry.for_folder("models/tiny") == ()


def test_without_executor_the_newest_is_assumed_and_said(tmp_path: Path) -> None:
    profile = probe_target(tmp_path, torch_npu="2.8.0")
    assert not profile.found and "newest" in profile.notes[0]
    assert profile.cache_entry_fields == newest_profile().cache_entry_fields


CACHE_INFO = """
from dataclasses import dataclass, field
from typing import ClassVar, Optional

if True:
    @dataclass
    class Base:
        cache_name: str
        kind: ClassVar[str] = "x"

@dataclass
class CacheEntry(Base):
    attn_type: str = "FullAttention"
    block_size: Optional[int] = None
    tensor_setter: object = None
    computed: int = field(init=False, default=0)

@dataclass
class ModelCacheInfo:
    num_layers: int
    layer_infos: list
"""


def test_classes_are_followed_where_they_live(tmp_path: Path) -> None:
    """Not a line shape and not a file name: bases count, ClassVar and init=False do not, another module is fine."""
    deep = tmp_path / "executor" / "some" / "where"
    deep.mkdir(parents=True)
    (deep / "entries.py").write_text(CACHE_INFO)
    (tmp_path / "executor" / "meta.py").write_text(
        "class ForwardMetaData:\n    def __init__(self, is_prefill=False, *, actual_seq_lengths_cu_q=None):\n"
        "        pass\n"
    )
    profile = probe(tmp_path, use_installed=False).profile
    assert profile.cache_entry_fields == ("cache_name", "attn_type", "block_size", "tensor_setter")
    assert profile.cache_info_module == "executor.some.where.entries"
    assert profile.forward_metadata_fields == ("is_prefill", "actual_seq_lengths_cu_q")
    assert profile.input_era == "packed-1d"


def test_of_two_definitions_the_imported_one_counts(tmp_path: Path) -> None:
    package = tmp_path / "executor"
    package.mkdir()
    (package / "new.py").write_text(CACHE_INFO)
    (package / "old.py").write_text(
        "class ModelCacheInfo:\n    def __init__(self, num_layers, block_size):\n        pass\n"
    )
    (package / "engine.py").write_text("from executor.new import CacheEntry, ModelCacheInfo\n")
    assert probe(tmp_path, use_installed=False).profile.block_size_on == "entry"
    (package / "engine.py").write_text("from .old import ModelCacheInfo\n")
    assert probe(tmp_path, use_installed=False).profile.block_size_on == "model"
    (package / "engine.py").write_text("")
    codes = {f.code: f.severity for f in probe(tmp_path, use_installed=False).findings}
    assert codes["KV064"] is Severity.BLOCKING


def test_zeroed_allocation_is_seen_through_helpers(tmp_path: Path) -> None:
    package = tmp_path / "executor"
    package.mkdir()
    (package / "info.py").write_text(CACHE_INFO)
    body = (
        "import torch\n"
        "def _make(n):\n    return torch.{call}(n)\n"
        "def allocate(entries):\n    for e in entries:\n        e.tensor_setter(_make(3))\n"
        "def elsewhere():\n    return torch.zeros(1)\n"
    )
    for call, expected in (("empty", False), ("zeros", True)):
        (package / "alloc.py").write_text(body.format(call=call))
        assert probe(tmp_path, use_installed=False).profile.null_block_zeroed is expected


def test_broken_executor_source_is_one_error(tmp_path: Path) -> None:
    package = tmp_path / "executor"
    package.mkdir()
    (package / "info.py").write_text(CACHE_INFO + "\nclass ForwardMetaData(\n")
    with pytest.raises(InputError) as caught:
        probe(tmp_path, use_installed=False)
    assert [f.code for f in caught.value.findings] == ["KV065"]
    assert caught.value.findings[0].span.path == "executor/info.py"
