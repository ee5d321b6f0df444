"""The memory plan: by hand, beside the framework's own functions, and what-if."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvskill.analyzer.memory import CacheGeometry, newest_formulas, parse_what_if, plan_memory, read_formulas
from kvskill.analyzer.memory.formulas import evaluate
from kvskill.analyzer.target.classes import SourceTree
from kvskill.analyzer.yamls import RunSettings
from kvskill.diagnostics import InputError
from kvskill.embedded import materialise

sys.path.insert(0, str(Path(__file__).parent))
import framework

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@needs_torch
@pytest.mark.parametrize("era", ["2026-04", "2026-06", "2026-08"])
def test_equal_to_the_embedded_framework(era: str, tmp_path: Path) -> None:
    assert framework.compare(materialise(tmp_path / "repo", era)) == []


@needs_torch
def test_two_windows_by_manager_key(tmp_path: Path) -> None:
    models = {
        "two": framework.kv(3, 8, 64, 128, "SlidingWindow_128")
        + framework.kv(2, 4, 96, 1024, "SlidingWindow_1024")
        + framework.kv(1, 2, 512)
    }
    assert framework.compare(materialise(tmp_path / "repo", "2026-06"), models) == []


@needs_torch
def test_the_comparison_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework, "plan_memory", lambda c, r, f, y: plan_memory(c, replace(r, block_size=32), f, y))
    assert framework.compare(materialise(tmp_path / "repo", "2026-04"))


def test_by_hand() -> None:
    caches = [
        CacheGeometry("k", "FullAttention", "FullAttention", 2, 8, 64),
        CacheGeometry("v", "FullAttention", "FullAttention", 2, 8, 64),
        CacheGeometry("k", "SlidingWindow", "SlidingWindow", 3, 8, 64, window=128),
        CacheGeometry("v", "SlidingWindow", "SlidingWindow", 3, 8, 64, window=128),
    ]
    run = RunSettings(batch_size=8, input_len=1000, max_new_tokens=24, world_size=4, attn_tp_size=2)
    plan = plan_memory(caches, run, newest_formulas(), "x.yaml")
    assert plan.batch_per_rank == 4 and plan.max_total_len == 1024
    assert plan.blocks == {"FullAttention": 4 * 8 + 1, "SlidingWindow": 4 * (1 + 1) + 1}
    row = 4 * 64 * 2  # heads per rank, dim, bytes
    assert plan.paged_bytes == 2 * 2 * 33 * 128 * row + 3 * 2 * 9 * 128 * row
    assert plan.legacy_bytes == 5 * 2 * 4 * 1024 * row  # Legacy keeps the whole length whatever the window


def test_mtp_terms() -> None:
    caches = framework.mla(61) + framework.mla(1, mtp=True)
    run = RunSettings(batch_size=2, input_len=100, max_new_tokens=20)
    assert plan_memory(caches, run, newest_formulas(), None).max_total_len == 120
    with_mtp = replace(run, next_n=2)
    plan = plan_memory(caches, with_mtp, newest_formulas(), None)
    assert plan.max_total_len == 100 + 20 * 3 + 2
    assert plan.paged_bytes == 62 * plan.blocks["FullAttention"] * 128 * 576 * 2


def test_formulas_come_from_the_target(tmp_path: Path) -> None:
    repo = materialise(tmp_path / "repo", "2026-04")
    formulas = read_formulas(SourceTree(repo, "executor"))
    assert formulas.max_total_len_at is not None
    engine = repo / formulas.max_total_len_at.path
    text = engine.read_text().splitlines()
    line = formulas.max_total_len_at.line - 1
    indent = text[line][: len(text[line]) - len(text[line].lstrip())]
    target = text[line].split("=")[0].strip()
    text[line : formulas.max_total_len_at.end_line] = [f"{indent}{target} = self.input_truncated_len * 2 + 7"]
    engine.write_text("\n".join(text) + "\n")
    changed = read_formulas(SourceTree(repo, "executor"))
    assert changed.total(RunSettings(input_len=10)) == 27


def test_unreadable_formula_falls_back(tmp_path: Path) -> None:
    (tmp_path / "executor").mkdir()
    (tmp_path / "executor" / "engine.py").write_text("def f(self):\n    self.max_total_len = self.other() + 1\n")
    formulas = read_formulas(SourceTree(tmp_path, "executor"))
    assert formulas.max_total_len == newest_formulas().max_total_len and formulas.max_total_len_at is None


@pytest.mark.parametrize("bad", ["__import__('os')", "input_truncated_len ** 9", "len(x)", "unknown + 1"])
def test_expressions_are_arithmetic_only(bad: str) -> None:
    with pytest.raises(ValueError):
        evaluate(bad, RunSettings())


def test_what_if() -> None:
    base = RunSettings(batch_size=4, world_size=2, attn_tp_size=2)
    new = parse_what_if("batch=8, len=4096,new=512;tp=4,block=64", base)
    assert (new.batch_size, new.input_len, new.max_new_tokens, new.attn_tp_size, new.block_size) == (
        8,
        4096,
        512,
        4,
        64,
    )
    assert new.world_size == 4  # the number of data-parallel groups stays
    for bad in ("batch", "batch=x", "foo=1", "batch=0", "tp=3,world=4", "batch=1,world=8", "batch=-1"):
        with pytest.raises(InputError) as caught:
            parse_what_if(bad, base)
        assert caught.value.findings[0].code == "KV008"
