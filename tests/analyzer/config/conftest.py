"""Helpers for config tests: small configs that name only what a case is about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvskill.analyzer.config import ConfigFacts, understand

CORPUS = Path(__file__).resolve().parents[2] / "data" / "hf_configs"

PLAIN: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}


@pytest.fixture
def facts() -> Callable[..., ConfigFacts]:
    """`facts(model_type, key=value, ...)`: a small config over PLAIN; a value of `...` removes the key."""

    def build(model_type: str | None = "llama", **changes: Any) -> ConfigFacts:
        config = {**PLAIN, **({"model_type": model_type} if model_type else {}), **changes}
        return understand({k: v for k, v in config.items() if v is not ...}, shown="config.json")

    return build


@pytest.fixture(scope="session")
def corpus() -> Path:
    return CORPUS
