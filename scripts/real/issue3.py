"""The verifier on real trees: it agrees where the code is right, and names the cause where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# config.json of deepseek-ai/DeepSeek-R1, the fields that the run reads
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
SLIDING = "models/gpt_oss/models/modeling_gpt_oss.py"


def _worst(report: dict[str, Any]) -> str:
    figures = [c["relative"] for c in report["comparisons"]]
    assert figures, "nothing was compared"
    return f"{len(figures)} requests, worst {max(figures):.1e}, {report['seconds']} s"


def _agrees(context: Any, commit: str, *extra: Any) -> str:
    tree = context.tree(commit, "qwen3_moe")
    return _worst(context.verify(tree / "models" / "qwen3_moe", "--against", "hf", *extra))


def paged_2026_04(context: Any) -> str:
    return _agrees(context, "0296d00")


def paged_2026_06(context: Any) -> str:
    return _agrees(context, "48a59dc")


def paged_newest(context: Any) -> str:
    return _agrees(context, context.newest())


def before_tree(context: Any) -> str:
    """The 2-D era Legacy model in its own tree is a second oracle."""
    tree, before = context.tree("0296d00", "qwen3_moe"), context.tree("82ac5cb", "qwen3_moe")
    report = context.verify(tree / "models" / "qwen3_moe", "--before-repo", before)
    oracles = sorted({c["oracle"] for c in report["comparisons"]})
    assert oracles == ["HF", "Legacy"], oracles
    return _worst(report)


def backends(context: Any) -> str:
    """Wheel and table give the same figures bit for bit."""
    tree = context.tree("0296d00", "qwen3_moe")
    found = [context.verify(tree / "models" / "qwen3_moe", "--backend", kind) for kind in ("wheel", "table")]
    first, second = ([c["relative"] for c in r["comparisons"]] for r in found)
    assert first == second, (first, second)
    assert [r["backend"]["kind"] for r in found] == ["wheel", "table"]
    return f"both {max(first):.3e}"


def tensor_parallel(context: Any) -> str:
    return _agrees(context, "48a59dc", "--tp", 2)


def sliding_defect(context: Any) -> str:
    """The public sliding-window model fails past the window, with the cause named."""
    tree = context.tree("0296d00", "gpt_oss")
    report = context.verify(tree / "models" / "gpt_oss", "--python", context.old_transformers(), expect=1)
    facts = " ".join(f["fact"] for f in report["findings"])
    assert "W + 1" in facts, facts
    assert "freed block" in facts, facts
    good = [c for c in report["comparisons"] if c["prompt"] + 24 <= 128]
    assert good and all(c["ok"] for c in good), "requests inside the window must agree"
    return "; ".join(sorted({f["code"] for f in report["findings"]}))


def sliding_cured(context: Any) -> str:
    """With pre_tokens - 1 the same model passes."""
    tree = context.copy("0296d00", "gpt_oss")
    path = Path(tree) / SLIDING
    text = path.read_text(encoding="utf-8")
    cured = text.replace("pre_tokens=self.sliding_window if", "pre_tokens=self.sliding_window - 1 if")
    assert cured != text
    path.write_text(cured, encoding="utf-8")
    report = context.verify(path.parents[1], "--python", context.old_transformers())
    assert max(c["prompt"] for c in report["comparisons"]) > 128
    return _worst(report)


def latent(context: Any, *extra: Any) -> str:
    """Latent attention: the Paged model of the tree, with the public config's dims."""
    config = context.work / "deepseek_r1.json"
    config.write_text(json.dumps(LATENT), encoding="utf-8")
    tree = context.tree("0296d00", "deepseek_r1")
    python = context.old_transformers()
    return _worst(context.verify(tree / "models" / "deepseek_r1", "--config", config, "--python", python, *extra))


def drafts(context: Any) -> str:
    """One draft token per step: the main model agrees, the draft model's decode agrees with its prefill."""
    return latent(context, "--mtp", 1)


def old_ranks(context: Any) -> str:
    """A tree whose manager gives every rank the number 0: said, and not blamed on the model."""
    tree = context.tree("0296d00", "qwen3_moe")
    report = context.verify(tree / "models" / "qwen3_moe", "--tp", 2, "--against", "hf")
    assert "KV422" in {f["code"] for f in report["findings"]}
    return _worst(report)


def bfloat16(context: Any) -> str:
    return _agrees(context, "48a59dc", "--dtype", "bf16")


def speed(context: Any) -> str:
    """A small model against both oracles in 20 s of wall time."""
    tree, before = context.tree("0296d00", "qwen3_moe"), context.tree("82ac5cb", "qwen3_moe")
    report = context.verify(tree / "models" / "qwen3_moe", "--before-repo", before)
    assert report["seconds"] < 20, f"{report['seconds']} s"
    return f"{report['seconds']} s"


LINES = [
    ("Paged qwen3_moe at 0296d00 agrees with HF", paged_2026_04),
    ("Paged qwen3_moe at 48a59dc agrees with HF", paged_2026_06),
    ("Paged qwen3_moe at the newest commit agrees with HF", paged_newest),
    ("Legacy of the 2-D era is a second oracle", before_tree),
    ("wheel and table agree bit for bit", backends),
    ("tp 2 on gloo agrees with HF", tensor_parallel),
    ("tp 2 in a tree with wrong rank numbers: said, model agrees", old_ranks),
    ("bfloat16 agrees within its own bound", bfloat16),
    ("Paged deepseek_r1 at 0296d00 agrees with HF", latent),
    ("Paged deepseek_r1 with one draft token", drafts),
    ("Paged gpt_oss as it is: fails past the window, cause named", sliding_defect),
    ("Paged gpt_oss with pre_tokens - 1: passes", sliding_cured),
    ("small model against both oracles under 20 s", speed),
]
