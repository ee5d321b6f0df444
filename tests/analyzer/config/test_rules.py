"""Rules, one kind of case each: windows and gates, patterns, heads, scales, sharing, masks, unknown classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvskill.analyzer.config import ConfigFacts
from kvskill.analyzer.config.report import to_json
from kvskill.diagnostics import InputError, Refusal

Build = Callable[..., ConfigFacts]


def codes(facts: ConfigFacts) -> set[str]:
    return {f.code for f in facts.findings}


# windows: value, gate, null, zero, length


@pytest.mark.parametrize(
    ("changes", "pattern", "window"),
    [
        ({"sliding_window": 1024, "use_sliding_window": False, "max_window_layers": 0}, "F" * 6, None),
        ({"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 0}, "S" * 6, 1024),
        ({"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 4}, "FFFFSS", 1024),
        ({"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 6}, "F" * 6, None),
        ({"sliding_window": 1024}, "F" * 6, None),  # the class's gate is off
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, "F" * 6, None),
        ({"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, "F" * 6, None),
        ({"sliding_window": -1, "use_sliding_window": True, "max_window_layers": 0}, "F" * 6, None),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, "F" * 6, None),
        ({"sliding_window": 4095, "use_sliding_window": True, "max_window_layers": 0}, "S" * 6, 4095),
    ],
)
def test_window_gates_of_a_gated_class(facts: Build, changes: dict[str, Any], pattern: str, window: int | None) -> None:
    made = facts("qwen2", **changes)
    assert made.layer_pattern == pattern
    assert made.sliding_window.value == window
    assert all(x.window == window for x in made.layers if x.attn_type == "SlidingWindow")


def test_a_class_without_a_window_ignores_the_key(facts: Build) -> None:
    made = facts("llama", sliding_window=1024)
    assert made.layer_pattern == "F" * 6 and "KV116" in codes(made)
    assert facts("mistral", sliding_window=1024).layer_pattern == "S" * 6


def test_a_rope_factor_stretches_the_length_that_makes_a_window_inert(facts: Build) -> None:
    rope = {"type": "yarn", "factor": 4.0}
    assert facts("mistral", sliding_window=4096, rope_scaling=rope).layer_pattern == "S" * 6
    assert facts("mistral", sliding_window=16384, rope_scaling=rope).layer_pattern == "F" * 6
    long = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert facts("mistral", sliding_window=4096, rope_scaling=long).layer_pattern == "F" * 6


def test_sliding_layers_without_a_window_are_a_contradiction(facts: Build) -> None:
    with pytest.raises(Refusal) as caught:
        facts("olmo3", layer_types=["sliding_attention"] * 6, sliding_window=None)
    assert caught.value.findings[0].code == "KV055"


def test_two_readings_of_a_window(facts: Build) -> None:
    made = facts("mimo_v2_flash", hybrid_layer_pattern=[0, 1, 1, 1, 1, 0], sliding_window=128, sliding_window_size=128)
    assert made.layer_pattern == "FSSSSF"
    assert made.sliding_window.value == 129 and made.acceptable_windows == (128, 129) and "KV119" in codes(made)


# patterns


@pytest.mark.parametrize(
    ("model_type", "changes", "pattern"),
    [
        ("gemma2", {"attn_logit_softcapping": None}, "SFSFSF"),
        ("gemma3_text", {"sliding_window_pattern": 3}, "SSFSSF"),
        ("cohere2", {}, "SSSFSS"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "SSSFSS"),
        ("exaone4", {"sliding_window": None}, "FFFFFF"),
        ("afmoe", {"global_attn_every_n_layers": 2}, "SFSFSF"),
        ("modernbert-decoder", {"global_attn_every_n_layers": 3, "local_attention": 128}, "FSSFSS"),
        ("cwm", {}, "FSSSFS"),
        ("muse_spark_text", {}, "SFSSSF"),
        ("gpt_neo", {"attention_types": [[["global", "local"], 3]], "num_layers": 6}, "FSFSFS"),
        ("gpt_neo", {"attention_layers": ["local"] * 6, "num_layers": 6}, "SSSSSS"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 128, "no_rope_layer_interval": 2}, "FSFSFS"),
        ("qwen3_next", {"full_attention_interval": 3}, "LLFLLF"),
        ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 1}, "LFLLFL"),
        ("bamba", {"attn_layer_indices": [1, 4]}, "LFLLFL"),
        ("baichuan_m1", {"sliding_window_layers": [1, 3, 5], "num_swa_key_value_heads": 4}, "FSFSFS"),
        ("lfm2", {"full_attn_idxs": [2, 5]}, "LLFLLF"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 3}, "LFLFLF"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mamba", "attention"] * 2}, "LLFLLF"),
        ("recurrent_gemma", {"block_types": ["recurrent", "recurrent", "attention"]}, "LLSLLS"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*E*"}, "L-LF-F"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [3, 6], "kda_layers": [1, 2, 4, 5]}}, "LLMLLM"),
        ("minimax_m1", {"attn_type_list": [0, 0, 1, 0, 0, 1], "sliding_window": None}, "LLFLLF"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"] * 3, "sliding_window": 64}, "LSLSLS"),
        ("llama4_text", {"no_rope_layers": [1, 1, 0, 1, 1, 0], "attention_chunk_size": 512}, "CCFCCF"),
        ("llama4_text", {"no_rope_layers": [], "attention_chunk_size": 512}, "CCCFCC"),
        ("llama4_text", {"attention_chunk_size": None}, "FFFFFF"),
        ("mllama_text_model", {"cross_attention_layers": [1, 3]}, "FXFXFF"),
        ("phi3small", {"dense_attention_every_n_layers": 3, "blocksparse_block_size": 64}, "BBFBBF"),
        ("zamba2", {"layers_block_type": ["mamba", "hybrid"] * 3, "hidden_size": 512}, "LFLFLF"),
        ("falcon_h1", {}, "FFFFFF"),
        ("rwkv", {}, "LLLLLL"),
        ("mamba2", {}, "LLLLLL"),
        ("minimax_m3_vl_text", {"sparse_attention_config": {"sparse_attention_freq": [0, 0, 0, 1, 1, 1]}}, "FFFBBB"),
    ],
)
def test_layer_patterns(facts: Build, model_type: str, changes: dict[str, Any], pattern: str) -> None:
    changes = {"sliding_window": 256, **changes} if "sliding_window" not in changes else changes
    assert facts(model_type, **changes).layer_pattern == pattern


def test_two_attention_blocks_per_layer_are_two_slots(facts: Build) -> None:
    made = facts("longcat_flash", num_hidden_layers=..., num_layers=3, head_dim=...)
    assert made.layer_pattern == "M" * 6 and made.kv_layers_total == 6
    assert made.layers_declared.value == 3 and "KV128" in codes(made)


def test_layers_run_in_loops_have_a_slot_for_each_pass(facts: Build) -> None:
    assert facts("ouro", total_ut_steps=4).layer_pattern == "F" * 24


def test_mtp_entries_behind_layer_types_are_cut(facts: Build) -> None:
    kinds = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
    made = facts("step3p5", layer_types=kinds, num_nextn_predict_layers=1, sliding_window=512)
    assert made.layer_pattern == "FSFSFS" and made.mtp.count == 1


# heads and widths


@pytest.mark.parametrize(
    ("model_type", "changes", "kv", "kind"),
    [
        ("llama", {"num_key_value_heads": 8}, 8, "MHA"),
        ("llama", {"num_key_value_heads": None}, 8, "MHA"),
        ("llama", {"num_key_value_heads": 1}, 1, "MQA"),
        ("chatglm", {"multi_query_attention": True, "multi_query_group_num": 2, "num_key_value_heads": ...}, 2, "GQA"),
        ("chatglm", {"multi_query_attention": False, "multi_query_group_num": 2, "num_key_value_heads": ...}, 8, "MHA"),
        ("gpt_bigcode", {"num_key_value_heads": ..., "head_dim": ...}, 1, "MQA"),
        ("gpt_bigcode", {"num_key_value_heads": ..., "multi_query": False, "head_dim": ...}, 8, "MHA"),
        ("falcon", {"num_key_value_heads": ..., "head_dim": ...}, 1, "MQA"),
        (
            "falcon",
            {"num_key_value_heads": ..., "num_kv_heads": 4, "new_decoder_architecture": True, "head_dim": ...},
            4,
            "GQA",
        ),
        ("falcon", {"num_key_value_heads": ..., "multi_query": False, "head_dim": ...}, 8, "MHA"),
        ("RefinedWeb", {"num_key_value_heads": ..., "n_head_kv": 4, "head_dim": ...}, 4, "GQA"),
        ("dbrx", {"num_key_value_heads": ..., "attn_config": {"kv_n_heads": 4}, "head_dim": ...}, 4, "GQA"),
        ("qwen", {"num_key_value_heads": ..., "head_dim": ..., "kv_channels": 64}, 8, "MHA"),
        (
            "mpt",
            {"num_key_value_heads": ..., "attn_config": {"attn_type": "multiquery_attention"}, "head_dim": ...},
            1,
            "MQA",
        ),
        ("plamo", {"num_key_value_heads": ..., "n_shared_head": 4}, 2, "GQA"),
        ("new", {"num_key_value_heads": ..., "multi_query_attention": False, "n_kv_heads": 4}, 4, "GQA"),
        ("step3_text", {"num_key_value_heads": ..., "num_attention_groups": 1}, 1, "MQA"),
    ],
)
def test_kv_heads(facts: Build, model_type: str, changes: dict[str, Any], kv: int, kind: str) -> None:
    made = facts(model_type, **changes)
    assert (made.kv_heads.value, made.attention_kind) == (kv, kind)
    assert made.layers[0].kv_heads == kv


def test_head_dim_explicit_derived_null_and_default(facts: Build) -> None:
    assert facts(head_dim=128).head_dim.value == 128
    assert facts(head_dim=...).head_dim.value == 64
    assert facts(head_dim=None).head_dim.value == 64
    assert facts("gemma", head_dim=...).head_dim.value == 256
    made = facts("gpt_oss", hidden_size=720, num_attention_heads=16, head_dim=64)
    assert made.head_dim.value == 64 and made.naive_head_dim == 45 and "KV120" in codes(made)


def test_doubled_width_of_shared_blocks(facts: Build) -> None:
    made = facts("zamba2", layers_block_type=["mamba", "hybrid"] * 3, num_key_value_heads=8, head_dim=...)
    assert made.head_dim.value == 128
    assert made.scale.value == pytest.approx(64**-0.5)
    assert any(e.name.startswith("recurrent state") for e in made.extra_caches)


def test_heads_differ_by_layer_kind(facts: Build) -> None:
    made = facts(
        "mimo_v2_flash",
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
        head_dim=192,
        v_head_dim=128,
        swa_num_key_value_heads=4,
        sliding_window=128,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    )
    full, sliding = made.layers[0], made.layers[1]
    assert (full.kv_heads, full.k_head_dim, full.v_head_dim) == (2, 192, 128)
    assert (sliding.kv_heads, sliding.k_head_dim, sliding.v_head_dim) == (4, 192, 128)
    assert made.sinks.value.startswith("sliding layers")
    assert len(made.groups) == 2


def test_heads_per_layer(facts: Build) -> None:
    made = facts(
        "nemotron-nas", block_configs=[{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}] * 3
    )
    assert made.layer_pattern == "F-F-F-" and made.layers[0].kv_heads == 2
    made = facts("llama", per_layer_config={"2": {"num_key_value_heads": 4}, "05": {"skip": ["attention"]}})
    assert [x.kv_heads for x in made.layers] == [2, 2, 4, 2, 2, None] and made.layer_pattern == "FFFFF-"
    made = facts("openelm", num_query_heads=[8, 8, 12, 12, 16, 16], num_kv_heads=[2, 2, 3, 3, 4, 4],
                 num_attention_heads=..., num_key_value_heads=...)  # fmt: skip
    assert [x.kv_heads for x in made.layers] == [2, 2, 3, 3, 4, 4] and made.layers[5].q_heads == 16


def test_wider_full_layers_and_shared_projections(facts: Build) -> None:
    made = facts(
        "gemma4_text", global_head_dim=128, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=128,
        num_kv_shared_layers=0,
    )  # fmt: skip
    last = made.layers[5]
    assert (last.kind, last.kv_heads, last.k_head_dim, last.scale) == ("full", 1, 128, 1.0)
    assert made.k_eq_v.value is not None and made.layers[0].k_head_dim == 64


# sharing


def test_last_layers_read_the_last_owner_of_their_kind(facts: Build) -> None:
    kinds = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    made = facts("gemma3n_text", layer_types=kinds, num_kv_shared_layers=2, sliding_window=128)
    assert made.layer_pattern == "SFSFsf" and made.kv_layers_total == 4
    assert [x.shares_kv_with for x in made.layers] == [None, None, None, None, 2, 3]
    with pytest.raises(Refusal):
        facts("gemma3n_text", layer_types=kinds, num_kv_shared_layers=6, sliding_window=128)


def test_cross_layer_attention_and_source_lists(facts: Build) -> None:
    assert facts("hunyuan", use_cla=True, cla_share_factor=2).layer_pattern == "FfFfFf"
    assert facts("hunyuan", use_cla=False, cla_share_factor=2).layer_pattern == "FFFFFF"
    made = facts("mistral_large4_text", kv_source_layers=[0, 0, 2, 2, 4, 4], head_dim=...)
    assert made.layer_pattern == "MmMmMm"


# scale

YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
MLA = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "head_dim": ...,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "scale"),
    [
        ("llama", {}, 64**-0.5),
        ("gemma2", {"query_pre_attn_scalar": 144, "attn_logit_softcapping": None}, 144**-0.5),
        ("granite", {"attention_multiplier": 0.015625}, 0.015625),
        ("jais", {"mup_scale_qk_dot_by_d": True}, 1 / 64),
        ("phi3small", {"mup_use_scaling": True, "mup_attn_multiplier": 1.0}, 1 / 64),
        ("gpt2", {"scale_attn_weights": False, "head_dim": ...}, 1.0),
        ("gemma3n_text", {"num_kv_shared_layers": 0}, 1.0),
        ("gpt_neo", {"num_layers": 6, "head_dim": ...}, 1.0),
        ("mpt", {"attn_config": {"softmax_scale": 0.3, "alibi": False}, "head_dim": ...}, 0.3),
        ("llama", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, 64**-0.5),  # not latent: no factor
        ("deepseek_v3", {**MLA}, 192**-0.5),
        (
            "deepseek_v3",
            {**MLA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            192**-0.5 * (0.1 * math.log(40) + 1) ** 2,
        ),
        (
            "deepseek_v2",
            {**MLA, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
            192**-0.5 * (0.0707 * math.log(40) + 1) ** 2,
        ),
        ("deepseek_v3", {**MLA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0}}, 192**-0.5),
        ("deepseek_v3", {**MLA, "rope_scaling": {**YARN, "mscale": 1.0}}, 192**-0.5),
    ],
)
def test_softmax_scale(facts: Build, model_type: str, changes: dict[str, Any], scale: float) -> None:
    made = facts(model_type, **changes)
    assert made.scale.value == pytest.approx(scale, abs=1e-12)
    assert all(x.scale == pytest.approx(scale, abs=1e-12) for x in made.layers if x.grows)


def test_scale_by_layer_index(facts: Build) -> None:
    made = facts("gpt2", scale_attn_by_inverse_layer_idx=True, head_dim=...)
    assert [x.scale for x in made.layers] == pytest.approx([0.125 / (i + 1) for i in range(6)])


def test_cos_sin_factor_is_not_in_the_scale(facts: Build) -> None:
    made = facts(
        "gpt_oss", rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    )
    assert made.rope.cos_sin_multiplier == pytest.approx(0.1 * math.log(32) + 1) and made.scale.value == 0.125


@pytest.mark.parametrize(
    ("changes", "dim"),
    [
        ({"partial_rotary_factor": 0.5}, 32),
        ({"rotary_pct": 0.25}, 16),
        ({"rotary_dim": 48}, 48),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 32),
        ({}, None),
    ],
)
def test_partial_rotary(facts: Build, changes: dict[str, Any], dim: int | None) -> None:
    assert facts("llama", **changes).rope.rotary_dim == dim


# latent attention


def test_latent_widths_and_the_ones_the_operator_lacks(facts: Build) -> None:
    made = facts("deepseek_v3", **MLA)
    assert made.attention_kind == "MLA" and made.head_dim.value is None and made.layers[0].cache_width == 576
    assert (made.layers[0].kv_heads, made.layers[0].q_heads) == (1, 8)
    small = facts(
        "minicpm3", **{**MLA, "kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
    )
    assert small.verdict.verdict == "legacy-keep" and "KV108" in small.verdict.grounds
    assert small.layers[0].cache_width == 288


def test_a_switched_off_latent_rank_is_not_latent_attention(facts: Build) -> None:
    off = {"kv_lora_rank": None, "q_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0, "v_head_dim": 0}
    for changes in (off, {**off, "use_mla": False}, {**MLA, "use_mla": False, "head_dim": 64}):
        made = facts("deepseek_v2", **changes)
        assert made.mla is None and made.layer_pattern == "F" * 6 and made.head_dim.value == 64


def test_indexer_cache_and_shared_indexers(facts: Build) -> None:
    made = facts("deepseek_v32", **MLA, index_head_dim=128, index_n_heads=64, index_topk=2048)
    assert [(e.head_dim, e.layers) for e in made.extra_caches] == [(128, 6)] and made.verdict.verdict == "paged"
    made = facts("glm_moe_dsa", **MLA, index_head_dim=128, indexer_types=["full", "shared"] * 3)
    assert [(e.head_dim, e.layers) for e in made.extra_caches] == [(128, 3)]


def test_pooled_keys_are_a_ground(facts: Build) -> None:
    made = facts(
        "deepseek_v4", head_dim=512, num_key_value_heads=1, sliding_window=128, compress_ratios=[128, 128, 4, 128, 4, 0]
    )
    assert made.layer_pattern == "S" * 6 and made.verdict.verdict == "legacy-keep" and "KV110" in made.verdict.grounds
    assert (made.layers[0].kv_heads, made.layers[0].k_head_dim, made.layers[0].v_head_dim) == (1, 512, 0)
    assert to_json(made)["kv_elems_per_token"] == {"full": 0, "sliding": 6 * 512}
    assert {e.name for e in made.extra_caches} >= {"compressed K/V"}


# grounds and verdicts


@pytest.mark.parametrize(
    ("model_type", "changes", "verdict", "code"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0, "sliding_window": 64}, "legacy-keep", "KV100"),
        ("gemma2", {"attn_logit_softcapping": 0, "sliding_window": 64}, "paged", None),
        (
            "gemma2",
            {"attn_logit_softcapping": None, "final_logit_softcapping": 30.0, "sliding_window": 64},
            "paged",
            None,
        ),
        ("mpt", {"attn_config": {"alibi": True}, "head_dim": ...}, "legacy-keep", "KV101"),
        ("bloom", {"head_dim": ...}, "legacy-keep", "KV101"),
        ("falcon", {"alibi": True, "num_key_value_heads": ..., "head_dim": ...}, "legacy-keep", "KV101"),
        (
            "baichuan",
            {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": ..., "head_dim": ...},
            "legacy-keep",
            "KV101",
        ),
        ("grok-1", {"max_attn_val": 30.0}, "legacy-keep", "KV100"),
        ("llama", {"head_dim": 520}, "legacy-keep", "KV109"),
        ("llama", {"head_dim": 42}, "legacy-keep", "KV109"),
        ("chatglm", {"position_encoding_2d": True, "num_key_value_heads": ...}, "legacy-keep", "KV103"),
        ("diffllama", {}, "legacy-keep", "KV103"),
        ("llama", {"is_causal": False}, "out-of-scope", None),
        ("gemma3_text", {"use_bidirectional_attention": True}, "out-of-scope", None),
        ("gemma4_text", {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0}, "paged", None),
        ("bert", {"num_key_value_heads": ..., "head_dim": ...}, "out-of-scope", None),
        ("bert", {"num_key_value_heads": ..., "head_dim": ..., "is_decoder": True}, "paged", None),
        ("t5", {"d_model": 512, "d_kv": 64, "num_key_value_heads": ..., "head_dim": ...}, "out-of-scope", None),
        ("clip_text_model", {}, "out-of-scope", None),
        ("rwkv", {}, "out-of-scope", None),
    ],
)
def test_verdicts(facts: Build, model_type: str, changes: dict[str, Any], verdict: str, code: str | None) -> None:
    made = facts(model_type, **changes)
    assert made.verdict.verdict == verdict, made.verdict
    assert code is None or code in made.verdict.grounds
    assert made.verdict.reason


def test_legacy_keep_names_its_key(facts: Build) -> None:
    made = facts("gemma2", attn_logit_softcapping=50.0)
    finding = next(f for f in made.findings if f.code == "KV100")
    assert "attn_logit_softcapping" in finding.fact and finding.data["keys"] == ["attn_logit_softcapping"]


# nested settings


def test_nested_settings_win_over_other_towers() -> None:
    from kvskill.analyzer.config import understand

    text: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    tower = {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16}
    for path in (("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config")):
        node: dict[str, Any] = dict(text)
        for key in reversed(path):
            node = {key: node, "vision_config": tower, "audio_config": tower}
        made = understand({"model_type": "new_vl", **node}, shown="c.json")
        assert made.text_path == ".".join(path) and len(made.layers) == 4 and made.multimodal
        assert made.layers_declared.evidence.keys == (".".join([*path, "num_hidden_layers"]),)


def test_levels_that_disagree_are_refused(facts: Build) -> None:
    text = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    made = facts("new_vl", text_config=text)
    assert made.verdict.verdict == "legacy-keep" and "KV131" in made.verdict.grounds


# unknown classes


def test_unknown_class_with_complete_keys_is_answered_with_a_note(facts: Build) -> None:
    made = facts("brand_new")
    assert made.verdict.verdict == "paged" and "KV118" in codes(made) and not made.known_class
    assert facts("brand_new", sliding_window=256).layer_pattern == "S" * 6
    assert facts("brand_new", sliding_window=256, sliding_window_pattern=3).layer_pattern == "SSFSSF"
    assert facts(None).verdict.verdict == "paged"


def test_an_unknown_model_type_takes_the_class_of_its_architecture(facts: Build) -> None:
    made = facts("renamed", architectures=["Gemma3ForCausalLM"], sliding_window=128, head_dim=...)
    assert made.layer_pattern == "SSSSSF" and made.scale.value == 256**-0.5 and "KV118" in codes(made)
    made = facts(None, architectures=["QWenLMHeadModel"], num_key_value_heads=..., kv_channels=64, head_dim=...)
    assert made.kv_heads.value == 8 and made.verdict.verdict == "paged"


def test_unknown_class_with_missing_or_ambiguous_keys_is_not_guessed(facts: Build) -> None:
    made = facts("brand_new", num_key_value_heads=...)
    assert made.verdict.verdict == "legacy-keep" and "KV130" in made.verdict.grounds
    for changes in (
        {"global_attn_every_n_layers": 3, "sliding_window": 256},
        {"multi_query": True, "num_key_value_heads": 4},
        {"num_hidden_layers": ...},
        {"head_dim": ..., "hidden_size": ...},
        {"layer_types": ["full_attention", "strange"] * 3},
    ):
        with pytest.raises(Refusal):
            facts("brand_new", **changes)
    with pytest.raises((Refusal, InputError)):
        facts("vision_thing", vocab_size=...)


# quantisation


def test_kv_quantisation_in_the_config(facts: Build) -> None:
    scheme = {"num_bits": 8, "type": "float"}
    made = facts(quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    assert made.quant.kv_cache_quant == "kv_cache_scheme: float8" and "KV121" in codes(made)
    made = facts(quantization_config={"quant_method": "fp8"})
    assert made.quant.method == "fp8" and made.quant.kv_cache_quant is None
    made = facts(quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"})
    assert made.quant.kv_cache_quant == "kv_cache_quant_algo: FP8"


def test_moe_needs_more_than_one_expert(facts: Build) -> None:
    assert facts(num_experts=1).moe.is_moe is False
    assert facts("granitemoehybrid", num_local_experts=0, layer_types=["attention"] * 6).moe.is_moe is False
    made = facts("mixtral", num_local_experts=8)
    assert (made.moe.is_moe, made.moe.experts, made.moe.key) == (True, 8, "num_local_experts")
