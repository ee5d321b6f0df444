"""Sliding windows and mixed layers on real input."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
GPT = "models/gpt_oss/models/modeling_gpt_oss.py"
CASES = ("gemma3", "gptoss", "ministral", "olmo3", "exaone4")
GPT_CONFIG = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "vocab_size": 201088,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "num_local_experts": 32,
    "num_experts_per_tok": 4, "intermediate_size": 2880, "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "initial_context_length": 4096, "max_position_embeddings": 131072, "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0, "hidden_act": "silu", "pad_token_id": 199999, "eos_token_id": 200002,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # the published shape of the 20b model


def _issue2() -> Any:
    spec = importlib.util.spec_from_file_location("real_issue2", Path(__file__).with_name("issue2.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt_oss(context: Any) -> str:
    """Legacy gpt_oss of the 2-D era: beyond three windows, reused blocks, NaN in unowned slots, against HF."""
    tree: Path = context.copy("0296d00", "gpt_oss")
    (tree / GPT).write_bytes(context.file("82ac5cb", GPT))
    (tree / "config.json").write_text(json.dumps(GPT_CONFIG))
    issue2 = _issue2()
    issue2.convert(context, tree, "gpt_oss", "--config", tree / "config.json")
    report = context.verify(
        "gpt_oss", "--repo", tree, "--against", "hf", "--long", "--python", context.old_transformers()
    )
    return str(issue2.worst(report))


def mixed(name: str, commit: str) -> Any:
    def line(context: Any) -> str:
        wanted = context.newest() if commit == "newest" else commit
        tree: Path = context.copy(wanted)
        case = HERE / "tests" / "cases" / name
        shutil.copytree(case / "models" / name, tree / "models" / name)
        shutil.copy(case / "config.json", tree / "models" / name / "config.json")
        issue2 = _issue2()
        issue2.convert(context, tree, name, "--config", tree / "models" / name / "config.json")
        report = context.verify(name, "--repo", tree, "--against", "hf", "--long")
        return str(issue2.worst(report))

    return line


LINES = [
    ("gpt_oss 82ac5cb in tree 0296d00, --long", gpt_oss),
    *[
        (f"mixed case {name} in tree {commit}, --long", mixed(name, commit))
        for commit in ("48a59dc", "newest")
        for name in CASES[:3]
    ],
]
