"""Modes of standalone runners, and the hazards of hand-paged ones: each fires, and not on the cured form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvskill.analyzer.runner.recognise import Recognised, recognise
from kvskill.diagnostics import ExitCode

PAGED = '''
import torch
import torch_npu


class Attention:
    def __init__(self, runner_settings, batch_size):
        self.block_size = runner_settings.get("model_config").get("pa_block_size", 128)
        max_length = runner_settings.get("model_config").get("pa_max_length", 2048)
        self.max_length = max_length
        cache_len = {blocks}
        self.block_table = torch.arange(batch_size * cache_len).reshape(batch_size, -1).int()
        self.offset = torch.arange(0, batch_size * self.max_length, {stride}).view(-1, 1)
        self.k_cache = torch.zeros(batch_size * cache_len, self.block_size, 2, 64)
        self.v_cache = torch.zeros(batch_size * cache_len, self.block_size, 2, 64)

    def step(self, kv_len):
        slot_mapping = kv_len.view(-1, 1) + self.offset
        actual_seq_lengths_kv = {lengths}
        return slot_mapping, actual_seq_lengths_kv

    def forward(self, q, k, v, slot_mapping, kv_len, cu):
        torch_npu.npu_scatter_nd_update_(self.k_cache.view(-1, 2, 64), slot_mapping, k)
        out, _ = torch_npu.npu_fused_infer_attention_score(
            q, {key}, {key}, num_heads=4, num_key_value_heads=2, input_layout="TND", scale=0.125,
            actual_seq_lengths=cu, actual_seq_lengths_kv={kv}, block_table=self.block_table,
            block_size=self.block_size, {more}
        )
        return out
'''
GOOD = {
    "blocks": "(max_length + self.block_size - 1) // self.block_size",
    "stride": "cache_len * self.block_size",
    "lengths": "kv_len + 1",
    "key": "self.k_cache.view(*self.k_cache.shape[:2], -1)",
    "kv": "kv_len",
    "more": "",
}


def _recognise(tmp_path: Path, **parts: str) -> Recognised:
    (tmp_path / "m").mkdir(exist_ok=True)
    (tmp_path / "m" / "modeling_m.py").write_text(PAGED.format(**{**GOOD, **parts}), encoding="utf-8")
    return recognise(tmp_path / "m", tmp_path)


def _codes(found: Recognised) -> set[str]:
    return {f.code for f in found.findings}


def test_a_clean_hand_paged_model_has_no_hazard(tmp_path: Path) -> None:
    found = _recognise(tmp_path)
    assert (found.mode, found.latent) == ("paged", False)
    assert _codes(found) == {"KV280"}


@pytest.mark.parametrize(
    ("part", "value", "code"),
    [
        ("blocks", "max_length // self.block_size", "KV282"),
        ("key", "self.k_cache", "KV286"),
        ("kv", "torch.cumsum(kv_len, 0)", "KV287"),
        ("lengths", "kv_len", "KV288"),
        ("lengths", "kv_len.to(torch.int32)", "KV288"),
    ],
)
def test_a_hazard_is_named_at_its_line(tmp_path: Path, part: str, value: str, code: str) -> None:
    found = [f for f in _recognise(tmp_path, **{part: value}).findings if f.code != "KV280"]
    assert {f.code for f in found} == {code}
    lines = PAGED.format(**{**GOOD, part: value}).splitlines()
    assert value in lines[found[0].span.line - 1]


def test_a_stride_that_is_a_length(tmp_path: Path) -> None:
    found = _recognise(tmp_path, blocks="max_length // self.block_size", stride="self.max_length")
    assert {"KV282", "KV283"} <= _codes(found)


def test_absorbed_prefill_and_custom_operators(tmp_path: Path) -> None:
    found = _recognise(tmp_path, more="query_rope=q, key_rope=torch.ops.custom.npu_own_rope(k)")
    assert found.latent and {"KV284", "KV285"} <= _codes(found)


def test_unreadable_files_do_not_stop_recognition(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "broken.py").write_text("def f(:\n", encoding="utf-8")
    assert _recognise(tmp_path).mode == "paged"


def test_mode_one_is_contiguous(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    found = recognise(folder.model, folder.model.parent)
    assert (found.mode, found.latent) == ("contiguous", False)


def test_a_hand_paged_runner_is_nothing_to_convert(tmp_path: Path, case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    assert folder.convert().status == "converted"
    before = folder.sources()
    analysis = folder.analyze()
    assert analysis.exit_code is ExitCode.DONE
    assert analysis.manifest.model.state == "paged-by-hand"
    assert {f.code for f in analysis.findings} == {"KV280"}  # no hazard in what the conversion writes
    done = folder.apply()
    assert (done.status, done.exit_code) == ("nothing-to-do", ExitCode.DONE)
    assert folder.sources() == before


def test_dict_metadata_is_no_conversion_target(case: Callable[[str], Any]) -> None:
    folder = case("by_hand")
    before = folder.sources()
    analysis = folder.analyze()
    assert (analysis.exit_code, analysis.manifest.model.state) == (ExitCode.DONE, "paged-by-hand")
    note = next(f for f in analysis.findings if f.code == "KV280")
    assert "plain dicts" in note.fact
    hazard = next(f for f in analysis.findings if f.code == "KV282")
    text = (folder.model / "runner_dicts.py").read_text(encoding="utf-8").splitlines()
    assert "max_seq_len // self.block_size" in text[hazard.span.line - 1]
    assert folder.apply().status == "nothing-to-do" and folder.sources() == before
