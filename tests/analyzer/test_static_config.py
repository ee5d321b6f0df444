"""Defaults of configuration classes, read without importing them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvskill.analyzer.static_config import read_defaults

BASE = """
from transformers import PretrainedConfig
import os

SIZE = 64
KINDS = ["sliding_attention", "full_attention"]

def _first(*values):
    for v in values:
        if v is not None:
            return v
    return None

class Rope:
    pass

class BaseConfig(PretrainedConfig):
    model_type = "base"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, hidden_size=8 * SIZE, num_attention_heads=8, num_key_value_heads=None, head_dim=None, **kwargs):
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        if num_key_value_heads is None:
            num_key_value_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or self.hidden_size // self.num_attention_heads
        self.rope_theta = kwargs.pop("rope_theta", 1e4)
        self.cache_dir = os.environ.get("HOME")
        super().__init__(tie_word_embeddings=False, **kwargs)


class ModelConfig(BaseConfig):
    model_type = "model"

    def __init__(self, num_hidden_layers=6, num_key_value_heads=2, window=None, layer_types=None, **kwargs):
        super().__init__(num_key_value_heads=num_key_value_heads, **kwargs)
        self.num_hidden_layers = num_hidden_layers
        self.sliding_window = _first(window, kwargs.get("sliding_window"), 128)
        self.layer_types = layer_types
        if self.layer_types is None:
            self.layer_types = [KINDS[1] if (i + 1) % 3 == 0 else KINDS[0] for i in range(self.num_hidden_layers)]
        self.extra = getattr(self, "absent", getattr(self, "head_dim", 0)) * 2
        self.rope_scaling = {"rope_type": "yarn", "factor": 4.0}
        self.dtype = torch.bfloat16


class VisionConfig(PretrainedConfig):
    model_type = "vision"


class WholeConfig(PretrainedConfig):
    model_type = "whole"
    sub_configs = {"text_config": ModelConfig}

    def __init__(self, text_config=None, **kwargs):
        if isinstance(text_config, dict):
            self.text_config = self.sub_configs["text_config"](**text_config)
        elif text_config is None:
            self.text_config = self.sub_configs["text_config"]()
        super().__init__(**kwargs)
"""


def _read(tmp_path: Path, text: str, name: str | None = None):
    path = tmp_path / "configuration_x.py"
    path.write_text(text)
    return read_defaults(path, "configuration_x.py", name)


def test_everything_that_is_literal_enough(tmp_path: Path) -> None:
    config = _read(tmp_path, BASE, "ModelConfig")
    v = config.values
    assert (v["model_type"], v["hidden_size"], v["num_key_value_heads"], v["head_dim"]) == ("model", 512, 2, 64)
    assert v["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert (v["sliding_window"], v["extra"], v["rope_theta"], v["dtype"]) == (128, 128, 1e4, "bfloat16")
    assert v["tie_word_embeddings"] is False and v["rope_scaling"]["factor"] == 4.0
    assert "cache_dir" not in v and "cache_dir" in config.skipped
    assert BASE.splitlines()[config.lines["sliding_window"] - 1].strip().startswith("self.sliding_window")


def test_nested_class_and_choice(tmp_path: Path) -> None:
    assert _read(tmp_path, BASE, "WholeConfig").values["text_config"]["num_key_value_heads"] == 2
    assert _read(tmp_path, BASE).name == "WholeConfig"  # the last one
    assert _read(tmp_path, BASE, "Nobody").name == "WholeConfig"
    assert _read(tmp_path, "x = 1\n") is None


def test_dataclass_style(tmp_path: Path) -> None:
    text = (
        "from dataclasses import field\nclass AConfig(PreTrainedConfig):\n    model_type: str = 'a'\n"
        "    num_hidden_layers: int = 3\n"
        "    layer_types: list = field(default_factory=lambda: ['full_attention'] * 3)\n"
        ""
    )
    assert _read(tmp_path, text).values == {
        "model_type": "a",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
    }


def test_unknown_branches_make_values_unknown(tmp_path: Path) -> None:
    text = (
        "class AConfig(PretrainedConfig):\n    model_type = 'a'\n"
        "    def __init__(self, n=2):\n"
        "        self.n = n\n        if is_npu():\n            self.n = 5\n"
        "        self.m = self.n + 1\n        self.k = 3\n"
    )
    assert _read(tmp_path, text).values == {"model_type": "a", "k": 3}


@pytest.mark.parametrize(
    "body",
    [
        "self.x = [0] * 10**9",
        "self.x = 2 ** 2 ** 2 ** 20",
        "self.x = [i for i in range(10**12)]",
        "for i in range(20000):\n            for j in range(20000):\n                self.x = i",
        "self.x = self.x",
        "self.x = AConfig()",
        "self.x = 'a' * (1 << 40)",
    ],
)
def test_hostile_code_ends_soon(tmp_path: Path, body: str) -> None:
    start = time.process_time()
    config = _read(
        tmp_path, f"class AConfig(PretrainedConfig):\n    model_type = 'a'\n    def __init__(self):\n        {body}\n"
    )
    assert config.values["model_type"] == "a" and time.process_time() - start < 2


def test_agrees_with_the_real_constructor(tmp_path: Path) -> None:
    """The same source run for real gives the same values (a stand-in base class instead of transformers)."""
    source = BASE.replace("from transformers import PretrainedConfig", "").replace("self.dtype = torch.bfloat16", "")
    base = (
        "class PretrainedConfig:\n    def __init__(self, **kwargs):\n        for k, v in kwargs.items():\n"
        "            setattr(self, k, v)\n"
    )
    namespace: dict = {}
    exec(base + source, namespace)  # our own fixture, not target code
    real = namespace["ModelConfig"]()
    ours = _read(tmp_path, BASE.replace("        self.dtype = torch.bfloat16\n", ""), "ModelConfig").values
    for key, value in ours.items():
        assert getattr(real, key) == value, key


def test_raise_ends_what_can_be_said(tmp_path: Path) -> None:
    text = (
        "class AConfig(PretrainedConfig):\n    model_type = 'a'\n    def __init__(self, n=None):\n        self.k = 3\n"
        "        if n is None:\n            raise ValueError('n')\n        self.n = 5\n"
    )
    assert _read(tmp_path, text).values == {"model_type": "a", "k": 3}
