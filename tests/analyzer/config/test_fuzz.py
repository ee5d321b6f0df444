"""Random changes of real configs: an answer or one finding, never another exception."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvskill.analyzer.config import understand
from kvskill.analyzer.config.report import summary, to_json
from kvskill.analyzer.config.rules import rules
from kvskill.diagnostics import KvskillError

CORPUS = Path(__file__).resolve().parents[2] / "data" / "hf_configs"
DEFAULTS = json.loads((files("kvskill") / "data" / "class_defaults.json").read_text(encoding="utf-8"))
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 64, 4096, 10**9, 1.5, 0.0, -2.5, 1e300, "", "x", "full_attention", "MEM*", [],
    [0], [1, 2], ["full_attention"], ["sliding_attention", "full_attention"], [None], [[1]], [[["global"], 2]], {},
    {"a": 1}, {"type": "yarn", "factor": 4}, {"rope_type": "x", "factor": None}, {"factor": "x"},
    {"full_attention": {}},
    {"0": {"num_key_value_heads": 1}}, {"full_attn_layers": [1]}, "alibi", [{"attention": {"n_heads_in_group": 4}}],
    [{"attention": None}], {"kv_n_heads": 2}, {"sparse_attention_freq": [0, 1]},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_no_input_makes_another_exception(seed: int) -> None:
    chance = random.Random(seed)
    configs = sorted(CORPUS.glob("*.json"))
    keys = sorted(set(DEFAULTS["keys"]) | {n for names in rules()["concepts"].values() for n in names})
    keys += ["hybrid_override_pattern", "hybrid_layer_pattern", "attn_type_list", "block_configs", "per_layer_config"]
    keys += ["linear_attn_config", "quantization_config", "rope_scaling", "architectures", "text_config", "use_cla"]
    types = [*DEFAULTS["classes"], "no_such_type", None]
    for _ in range(60):
        config: dict[str, Any] = (
            json.loads(chance.choice(configs).read_text())
            if chance.random() < 0.7
            else {"model_type": chance.choice(types)}
        )
        nested = config.get("text_config")
        target = nested if isinstance(nested, dict) and chance.random() < 0.8 else config
        for _ in range(chance.randint(1, 4)):
            target[chance.choice(keys)] = chance.choice(VALUES)
        try:
            facts = understand(config, shown="config.json")
        except KvskillError as exc:
            assert len(exc.findings) == 1
            continue
        json.dumps(to_json(facts))
        assert summary(facts)
