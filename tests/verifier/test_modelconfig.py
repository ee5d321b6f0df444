"""Shrinking keeps what decides the operator path: head dims, ratios, latent dims, rope, patterns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvskill.diagnostics import InputError
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.modelconfig import BaseConfig, base_config, shrink

KEPT = (
    "head_dim", "rope_scaling", "max_position_embeddings", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim", "q_lora_rank", "rope_theta", "partial_rotary_factor",
)  # fmt: skip
DENSE = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "pad_token_id": 31999, "eos_token_id": [1, 2],
}  # fmt: skip
MIXED = {
    **DENSE, "head_dim": 256, "sliding_window": 128, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
}  # fmt: skip
LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "vocab_size": 129280, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40}, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def model(literals: frozenset[int] = frozenset(), folder: Path = Path("m")) -> ModelUnderTest:
    return ModelUnderTest(
        root=folder.parent, folder=folder, name="m", modeling_module="m", causal_lm="M", config_module=None,
        config_class=None, literals=literals,
    )  # fmt: skip


def small(values: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    return shrink(BaseConfig(values, "test"), model(**kwargs)).values


@pytest.mark.parametrize("values", [DENSE, MIXED, LATENT], ids=["dense", "mixed", "latent"])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_decides_the_path_stays(values: dict[str, Any], tp: int) -> None:
    before = json.dumps(values)
    found = shrink(BaseConfig(values, "test"), model(), tp).values
    assert json.dumps(values) == before, "the base is not changed"
    for key in KEPT:
        assert found.get(key) == values.get(key), key
    ratio = values["num_attention_heads"] // values["num_key_value_heads"]
    assert found["num_attention_heads"] // found["num_key_value_heads"] == ratio
    assert found["num_key_value_heads"] % tp == 0
    assert found["vocab_size"] <= 320 and found["hidden_size"] <= values["hidden_size"] // 4


def test_derived_head_dim_stays() -> None:
    found = small(DENSE)
    assert found["hidden_size"] // found["num_attention_heads"] == 4096 // 32


def test_explicit_head_dim_of_another_size_stays_another_size() -> None:
    found = small(MIXED)
    assert found["head_dim"] * found["num_attention_heads"] != found["hidden_size"]


def test_every_layer_type_is_kept_with_its_place() -> None:
    found = small(MIXED)
    assert found["layer_types"] == MIXED["layer_types"][: found["num_hidden_layers"]]
    assert set(found["layer_types"]) == {"sliding_attention", "full_attention"}
    pattern = small({**DENSE, "sliding_window": 64, "sliding_window_pattern": 6})
    assert pattern["num_hidden_layers"] >= 6
    both = small({**DENSE, "sliding_window_pattern": 6, "first_k_dense_replace": 3})
    assert both["num_hidden_layers"] >= 6 and both["first_k_dense_replace"] == 1


def test_dense_layers_before_the_mixture_are_one() -> None:
    found = small(LATENT)
    assert (found["first_k_dense_replace"], found["num_hidden_layers"]) == (1, 2)
    assert found["num_experts_per_tok"] <= found["n_routed_experts"] // found["n_group"] * found["topk_group"]
    assert "quantization_config" not in found


@pytest.mark.parametrize(
    ("window", "literals", "expected"),
    [(128, frozenset(), 128), (4096, frozenset(), 40), (4096, frozenset({4096}), 4096), (0, frozenset(), None)],
)
def test_window_shrinks_only_where_nothing_else_has_its_number(
    window: int, literals: frozenset[int], expected: int | None
) -> None:
    found = shrink(BaseConfig({**DENSE, "sliding_window": window}, "test"), model(literals))
    assert found.window == expected
    inert = shrink(BaseConfig({**DENSE, "sliding_window": 4096, "use_sliding_window": False}, "test"), model())
    assert inert.window is None


def test_base_config_order_and_errors(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(InputError) as caught:
        base_config(model(folder=folder), None)
    assert caught.value.findings[0].code == "KV435"
    (folder / "config.json").write_text('{"hidden_size": 1}')
    assert base_config(model(folder=folder), None).values == {"hidden_size": 1}
    given = tmp_path / "other.json"
    given.write_text('{"hidden_size": 2}')
    assert base_config(model(folder=folder), given).values == {"hidden_size": 2}
    given.write_text("[1]")
    with pytest.raises(InputError):
        base_config(model(folder=folder), given)


def test_defaults_of_the_configuration_class(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "configuration_m.py").write_text(
        "class C(B):\n    model_type = 'm'\n    def __init__(self, a=1, b={'x': 2.0}, c=None, d=f(), **kw): ...\n"
    )
    found = ModelUnderTest(
        root=tmp_path, folder=folder, name="m", modeling_module="m", causal_lm="M",
        config_module="m.configuration_m", config_class="C",
    )  # fmt: skip
    base = base_config(found, None)
    assert base.values == {"model_type": "m", "a": 1, "b": {"x": 2.0}, "c": None}
    assert base.from_defaults
