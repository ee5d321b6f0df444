"""Standalone deployment on real trees: one runner is converted and verified, one is already paged by hand."""

from __future__ import annotations

import json
from typing import Any

QWEN, KIMI, DENSE, SINKS = "qwen3-moe", "kimi-k2-thinking", "pangu-7b", "gpt-oss"
# the published sizes of a 30B model of this architecture; its configuration class has no default for head_dim
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _converted(context: Any) -> Any:
    """A tree with the converted model, by the command line alone."""
    tree = context.copy("24b5f5a", QWEN)
    (tree / "config.json").write_text(json.dumps(CONFIG))
    model = tree / "models" / QWEN
    context.kvskill("analyze", model, "--config", tree / "config.json")
    context.kvskill("apply", model)
    return model


def _agrees(report: dict[str, Any]) -> str:
    """All prompts agree with HF; the old runner is wrong for the one-token prompt of a padded batch, and only there."""
    bad = [(c["oracle"], c["prompt"]) for c in report["comparisons"] if not c["ok"]]
    assert set(bad) <= {("old, right", 1)}, bad
    assert {f["code"] for f in report["findings"]} <= {"KV421"}, report["findings"]
    assert all(c["ok"] is not False for c in report["checks"]), report["checks"]
    worst = max(c["relative"] for c in report["comparisons"] if c["ok"])
    return f"{len(report['comparisons'])} comparisons, worst {worst:.1e}, {report['seconds']} s"


def standalone_qwen3_moe(context: Any) -> str:
    """analyze, apply, verify without hand edits; equal to its before-state one prompt at a time and to HF."""
    python = context.old_transformers()
    model = _converted(context)
    report = context.verify(model, "--python", python)
    oracles = {c["oracle"] for c in report["comparisons"]}
    assert oracles == {"HF, right", "old, right"}, oracles
    again = context.kvskill("apply", model)
    assert "nothing to do" in again.stdout
    return _agrees(report)


def two_ranks(context: Any) -> str:
    """The same on two ranks of gloo: attention, experts, embedding and head are sharded by the model itself."""
    python = context.old_transformers()
    report = context.verify(_converted(context), "--python", python, "--tp", 2)
    assert any(c["name"] == "runner.ranks-agree" and c["ok"] for c in report["checks"])
    return _agrees(report)


def by_name_without_config(context: Any) -> str:
    """The configuration class's own defaults, which have no head_dim, and the model by its name."""
    python = context.old_transformers()
    tree = context.copy("24b5f5a", QWEN)
    for command in (("analyze", QWEN), ("apply", QWEN)):
        context.kvskill(*command, "--repo", tree)
    return _agrees(context.verify(QWEN, "--repo", tree, "--python", python))


def cache_length_no_multiple(context: Any) -> str:
    """Block size 16, prompts and steps for a cache of 300 positions that is filled to the end."""
    python = context.old_transformers()
    model = _converted(context)
    report = context.verify(
        model, "--python", python, "--prompts", "277,5", "--decode-steps", 24, "--block-size", 16, "--timeout", 500
    )
    assert "cache length 300" in report["setup"][0], report["setup"]
    return _agrees(report)


def _unseen(context: Any, commit: str, name: str) -> dict[str, Any]:
    """Verify a standalone folder of a commit, converted as it is."""
    model = context.copy(commit, name) / "models" / name
    context.kvskill("analyze", model)
    context.kvskill("apply", model)
    report: dict[str, Any] = context.verify(model, "--python", context.old_transformers())
    return report


def dense_without_hf(context: Any) -> str:
    """Another runner of this form, which transformers does not know: weights by name, against its before-state."""
    report = _unseen(context, "72e87ab", DENSE)
    assert {c["oracle"] for c in report["comparisons"]} == {"old, right"}
    return _agrees(report)


def sinks_and_windows(context: Any) -> str:
    """A runner whose model gives logits of all columns, with sinks and every second layer a window of 128: equal to HF.

    Its before-state is not, once a prompt reaches the window.
    """
    report = _unseen(context, "6d83aeb", SINKS)
    assert all(c["ok"] for c in report["comparisons"] if c["oracle"].startswith("HF") or c["prompt"] < 100)
    assert {f["code"] for f in report["findings"]} == {"KV421"}
    return f"worst against HF {max(c['relative'] for c in report['comparisons'] if c['oracle'] == 'HF, right'):.1e}"


def kimi_by_hand(context: Any) -> str:
    """Modes two and three by hand: nothing to convert, exit 0, hazards at their lines."""
    tree = context.copy("db40505", KIMI)
    model = tree / "models" / KIMI
    found = json.loads(context.kvskill("analyze", model, "--json").stdout)
    text = json.dumps(found)
    for code in ("KV280", "KV282", "KV283", "KV284", "KV285"):
        assert f'"{code}"' in text, code
    before = {p: p.read_bytes() for p in model.rglob("*.py")}
    done = context.kvskill("apply", model)
    assert "nothing to do" in done.stdout
    assert before == {p: p.read_bytes() for p in model.rglob("*.py")}
    return "five kinds of findings, no file changed"


LINES = [
    ("standalone qwen3-moe at 24b5f5a converts and agrees with its before-state and HF", standalone_qwen3_moe),
    ("the same on two ranks (--tp 2)", two_ranks),
    ("the same by name and without --config", by_name_without_config),
    ("the same with a cache of 300 positions and block size 16", cache_length_no_multiple),
    ("pangu-7b at 72e87ab converts and agrees with its before-state", dense_without_hf),
    ("gpt-oss at 6d83aeb converts and agrees with HF", sinks_and_windows),
    ("kimi-k2-thinking at db40505 is paged by hand", kimi_by_hand),
]
