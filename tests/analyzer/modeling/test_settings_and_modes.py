"""What the walk knows of run settings, enumerations and overridden methods: which mode runs must be certain."""

from __future__ import annotations

from typing import Any

import pytest

from kvskill.analyzer.modeling.program import load_program
from kvskill.analyzer.modeling.run import run_model
from kvskill.analyzer.modeling.values import Const, EnumMember, Instance, Tensor

MODEL = """
import torch
import torch_npu
from operator import attrgetter
from enum import Enum, IntEnum
from executor.utils import Stage
from torch import nn


class Mode(Enum):
    OFF = 0
    ON = 1


class Level(IntEnum):
    LOW = 0
    HIGH = 1


class Base(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.build(config)

    def build(self, config):
        self.built = "base"


class Inner(Base):
    def __init__(self, config, infer_config):
        super().__init__(config, infer_config)
        self.proj = nn.Linear(config.hidden_size, config.width)

    def build(self, config):
        self.built = "inner"
        self.blocks = nn.ModuleDict({str(config.first + i): Base(config, None) for i in range(2)})


class TinyForCausalLM(nn.Module):
    def __init__(self, config, infer_config, comm_manager=None):
        super().__init__()
        custom = infer_config.model_config.custom_params
        self.mode = Mode(custom.get("mode", 0))
        self.stage = Stage(custom.get("stage", 1))
        self.level = Level(custom.get("level", 1))
        self.off = self.mode != Mode.ON
        self.prefill_stage = self.stage == Stage.PREFILL
        self.above = self.level > Level.LOW
        self.factor = config.scaling.get("factor", 1)
        self.missing = config.scaling.get("missing", 7)
        self.inner = Inner(config, infer_config)
        self.keyed = hasattr(self.inner.blocks, "values")
        self.parallel = infer_config.parallel_config.attn_tp_size > 1

    def process_weights_after_loading(self):
        weight = attrgetter("inner.proj.weight")(self)
        self.half = nn.Parameter(weight.T.view(4, 2, 3).permute(1, 2, 0).contiguous())

    def load_weights(self, weights):
        pass

    def forward(self, input_ids, position_ids=None, forward_metadata=None):
        x = torch.zeros(5, 2, 3)
        self.mixed = torch_npu.npu_transpose_batchmatmul(
            x, self.half, bias=None, scale=None, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        return x
"""
CONFIG = {"hidden_size": 4, "width": 6, "scaling": {"factor": 40}, "first": 61}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    base = tmp_path_factory.mktemp("tree")
    utils = base / "executor" / "utils"
    utils.mkdir(parents=True)
    (utils / "__init__.py").write_text("from .common import Stage\n")
    (utils / "common.py").write_text("from enum import Enum\n\n\nclass Stage(Enum):\n    DECODE = 0\n    PREFILL = 1\n")
    path = base / "modeling_tiny.py"
    path.write_text(MODEL)
    program = load_program([path], base)
    entry = program.find("TinyForCausalLM")
    assert entry is not None
    return run_model(program, entry, CONFIG, "prefill", "padded-2d").root


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", EnumMember("Mode", "OFF", 0)),
        ("stage", EnumMember("Stage", "PREFILL", 1)),
        ("level", 1),
        ("off", True),
        ("prefill_stage", True),
        ("above", True),
        ("missing", 7),
        ("keyed", True),
        ("parallel", False),
    ],
)
def test_settings_and_enumerations(root: Instance, name: str, value: Any) -> None:
    assert root.attrs[name] == Const(value)


def test_a_decision_says_which_setting_it_hangs_on(root: Instance) -> None:
    found = {n: root.attrs[n].origin for n in ("off", "prefill_stage", "parallel", "missing")}  # type: ignore[attr-defined]
    assert "custom_params['mode']" in found["off"] and "custom_params['stage']" in found["prefill_stage"]
    assert "parallel_config" in found["parallel"] and "infer." not in found["missing"]


def test_overridden_methods_run(root: Instance) -> None:
    inner = root.attrs["inner"]
    assert isinstance(inner, Instance) and inner.attrs["built"] == Const("inner")
    assert inner.attrs["blocks"].keys == ["61", "62"]  # type: ignore[attr-defined]


def test_what_happens_after_loading_is_known(root: Instance) -> None:
    half, mixed = root.attrs["half"], root.attrs["mixed"]
    assert isinstance(half, Tensor) and [str(d) for d in half.shape or ()] == ["2", "3", "4"]
    assert isinstance(mixed, Tensor) and [d.value for d in mixed.shape or ()] == [5, 2, 4]
