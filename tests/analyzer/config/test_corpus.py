"""The 80 labelled configs: every compared field, and the value in force of single keys."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvskill.analyzer.config import read_config, understand
from kvskill.analyzer.config.report import run_length, summary, to_json

CORPUS = Path(__file__).resolve().parents[2] / "data" / "hf_configs"
SAME = (
    "model_type",
    "architecture",
    "nested_under",
    "layers_declared",
    "attention_kind",
    "layer_pattern",
    "attn_types",
    "kv_layers_total",
    "sliding_window",
    "sliding_window_raw",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "naive_head_dim",
    "kv_groups",
    "kv_elems_per_token",
    "sinks",
    "softcap",
    "alibi",
    "mtp_layers",
    "moe",
    "encoder_decoder",
    "multimodal",
    "quantization",
    "kv_cache_quant",
)
# Labels whose rope kind is not taken over: GPTBigCode adds learned positions (wpe) and rotates nothing; "none" of
# jamba and the dynamic NTK switch of qwen are said more exactly here.
ROPE_DIFFERS = {"wizardcoder-15b", "jamba-v0.1", "qwen-7b-chat"}


@cache
def labels() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load((CORPUS / "labels.yaml").read_text(encoding="utf-8"), Loader=loader)["labels"])


SLUGS = sorted(p.stem for p in CORPUS.glob("*.json"))


def answer(slug: str) -> dict[str, Any]:
    path = CORPUS / f"{slug}.json"
    return to_json(understand(read_config(path), shown=path.name))


def test_every_file_has_a_label() -> None:
    assert len(SLUGS) == 80
    assert set(SLUGS) == set(labels())


@pytest.mark.parametrize("slug", SLUGS)
def test_agrees_with_the_label(slug: str) -> None:
    want, have = labels()[slug], answer(slug)
    assert have["paging_verdict"]["verdict"] == want["paging_verdict"]["verdict"]
    for name in SAME:
        assert have[name] == want[name], name
    mla = dict(want["mla"]) if want["mla"] else None
    if mla:
        mla.pop("v_head_dim_source")
    assert have["mla"] == mla
    assert have["text_model_type"] == want.get("text_model_type")
    assert have["chunk_or_local_span"] == want.get("chunk_or_local_span")
    assert (have["kv_sharing"] == "none") == (want["kv_sharing"] == "none")
    assert bool(have["k_eq_v"]) == bool(want.get("k_eq_v"))
    scale = want["softmax_scale"]["value"]
    if scale is None:
        assert have["softmax_scale"]["value"] is None
    else:
        assert have["softmax_scale"]["value"] == pytest.approx(scale, abs=1e-9, rel=0)
    extra = [(e["name"], e.get("head_dim"), e["layers"]) for e in want.get("extra_caches") or []]
    assert [(e["name"], e.get("head_dim"), e["layers"]) for e in have["extra_caches"] or []] == extra
    if slug not in ROPE_DIFFERS:
        rope = {k: v for k, v in have["rope"].items() if k not in ("rotary_dim", "layers_without")}
        assert rope == want["rope"]


@pytest.mark.parametrize("slug", SLUGS)
def test_every_conclusion_has_evidence(slug: str) -> None:
    have = answer(slug)
    assert have["paging_verdict"]["reason"]
    for name, row in have["evidence"].items():
        assert row["source"] in ("key", "class-default", "class-fact", "derived"), name
        assert row["keys"] or row["how"], name


def test_class_defaults_needed_names_the_missing_keys() -> None:
    have = answer("gemma-3-4b-it")["class_defaults_needed"]
    for key in (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "query_pre_attn_scalar",
        "sliding_window_pattern",
    ):
        assert key in have
    assert answer("llama-3-8b")["class_defaults_needed"] == []


def test_get_resolves_nested_settings_and_class_defaults() -> None:
    facts = understand(read_config(CORPUS / "gemma-3-4b-it.json"), shown="c.json")
    window, heads = facts.get("sliding_window"), facts.get("num_attention_heads")
    assert window is not None and window.value == 1024 and window.evidence.keys == ("text_config.sliding_window",)
    assert heads is not None and heads.value == 8 and heads.evidence.source == "class-default"
    assert facts.get("no_such_key") is None


def test_layers_know_their_geometry_and_owner() -> None:
    facts = understand(read_config(CORPUS / "gemma-4-e2b.json"), shown="c.json")
    assert [x.index for x in facts.layers] == list(range(35))
    owner = facts.layers[34].shares_kv_with
    assert (
        owner is not None
        and facts.layers[owner].owns_cache
        and facts.layers[owner].attn_type == facts.layers[34].attn_type
    )
    assert (facts.layers[0].window, facts.layers[0].k_head_dim) == (512, 256)
    assert (facts.layers[4].window, facts.layers[4].k_head_dim) == (None, 512)


@pytest.mark.parametrize(
    ("pattern", "short"),
    [
        ("F" * 32, "F32"),
        ("SSSSSF" * 10 + "SS", "(S5F)x10 S2"),
        ("SF" * 12, "(SF)x12"),
        ("LLLLFLLL" * 4, "(L4FL3)x4"),
        ("FFFXFFFFX", "F3XF4X"),
        ("M", "M"),
    ],
)
def test_run_length(pattern: str, short: str) -> None:
    assert run_length(pattern) == short


def test_summary_names_verdict_layers_and_groups() -> None:
    facts = understand(read_config(CORPUS / "gpt-oss-20b.json"), shown="gpt-oss-20b.json")
    text = summary(facts)
    assert text.splitlines()[0] == "gpt-oss-20b.json: paged (all KV layers)"
    assert "(SF)x12" in text and "window 128" in text and "8 K/V heads x 64" in text
