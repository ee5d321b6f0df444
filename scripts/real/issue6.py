"""Latent attention on real trees: the MLA cases convert and agree; deepseek_r1 of the 2-D era."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
CASES = HERE / "tests" / "cases"
R1 = "models/deepseek_r1/models"
R1_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "vocab_size": 129280,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "moe_intermediate_size": 2048, "intermediate_size": 18432, "moe_layer_freq": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1, "attention_bias": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}  # the published shape; the verifier shrinks what may be shrunk


def _case(context: Any, case: str, commit: str, cache: str | None, *extra: Any) -> str:
    """Convert a case in a copy of the tree and verify it against its Legacy form and transformers."""
    tree: Path = context.copy(context.newest() if commit == "newest" else commit)
    folder = tree / "models" / case
    shutil.copytree(CASES / case / "models" / case, folder)
    shutil.copy(CASES / case / "config.json", folder / "config.json")
    context.kvskill("analyze", case, "--repo", tree)
    manifest = folder / "kv_manifest.yaml"
    if cache is not None:
        text = manifest.read_text(encoding="utf-8")
        assert "mla_cache: null" in text
        manifest.write_text(text.replace("mla_cache: null", f"mla_cache: {cache}"), encoding="utf-8")
        context.kvskill("analyze", case, "--repo", tree)
    context.kvskill("apply", case, "--repo", tree)
    report = context.verify(case, "--repo", tree, *extra)
    assert "nothing to do" in context.kvskill("apply", case, "--repo", tree).stdout
    figures = [c["relative"] for c in report["comparisons"]]
    oracles = sorted({c["oracle"] for c in report["comparisons"]})
    assert oracles == ["HF", "Legacy"], oracles
    return f"{'+'.join(oracles)} {max(figures):.1e}"


def case(name: str, commit: str, cache: str | None, *extra: Any) -> Any:
    """A line for one case, tree and cache form."""

    def line(context: Any) -> str:
        return _case(context, name, commit, cache, *extra)

    return line


def odd_sizes(context: Any) -> str:
    """Sizes that the operator does not take: Legacy is kept, with the ground."""
    tree: Path = context.copy("0296d00")
    folder = tree / "models" / "minicpm3"
    shutil.copytree(CASES / "minicpm3" / "models" / "minicpm3", folder)
    shutil.copy(CASES / "minicpm3" / "config.json", folder / "config.json")
    found = context.kvskill("analyze", "minicpm3", "--repo", tree)
    assert "KV108" in found.stdout, found.stdout
    assert "keeps the Legacy cache" in context.kvskill("apply", "minicpm3", "--repo", tree).stdout
    return "Legacy kept, KV108"


def real_input(context: Any) -> str:
    """deepseek_r1 of 82ac5cb in tree 0296d00: converts without a blocking task and agrees with both oracles, without
    drafts and with one and three tokens drafted; with drafts it chooses the same greedy tokens."""
    python = context.old_transformers()
    tree: Path = context.copy("0296d00", "deepseek_r1")
    for name in ("modeling_deepseek.py", "modules.py"):
        (tree / R1 / name).write_bytes(context.file("82ac5cb", f"{R1}/{name}"))
    (tree / "config.json").write_text(json.dumps(R1_CONFIG))
    context.kvskill("analyze", "deepseek_r1", "--repo", tree, "--config", tree / "config.json")
    context.kvskill("apply", "deepseek_r1", "--repo", tree)
    before = context.tree("82ac5cb", "deepseek_r1")
    figures = []
    for drafts in (0, 1, 3):
        args = ("--repo", tree, "--before-repo", before, "--prompts", "5,1,3,17", "--mtp", drafts, "--python", python)
        report = context.verify("deepseek_r1", *args)
        oracles = sorted({c["oracle"] for c in report["comparisons"]})
        assert oracles == ["HF", "Legacy"], oracles
        greedy = [c for c in report["checks"] if c["name"] == "run.greedy"]
        assert all(c["ok"] for c in greedy) and bool(greedy) is bool(drafts), greedy
        figures.append(max(c["relative"] for c in report["comparisons"]))
    return f"{max(figures):.1e}, greedy tokens with drafts the same"


LINES = [
    ("deepseek_r1 of 82ac5cb in 0296d00", real_input),
    *[
        (f"{name}, {commit}, {cache or 'default'} cache", case(name, commit, cache, "--fast"))
        for name in ("deepseek_v3", "kimi", "longcat", "deepseek_v2")
        for commit in ("0296d00", "newest")
        for cache in (None, "nd")
    ],
    ("deepseek_v3 on two ranks", case("deepseek_v3", "newest", None, "--tp", 2)),
    *[
        (f"{name} in bf16, {cache or 'default'} cache", case(name, "newest", cache, "--dtype", "bf16", "--fast"))
        for name in ("deepseek_v3", "kimi", "longcat", "deepseek_v2")
        for cache in (None, "nd")
    ],
    ("deepseek_v3, repetitions, idle rows, reuse", case("deepseek_v3", "newest", None)),
    ("minicpm3 stays Legacy", odd_sizes),
]
