"""The formulas of the operator sheet's section 16 (items 10 to 16, and neighbours) in the converted runner.

The converted runner agrees with its before-state, run one prompt at a time; each naive formula does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
pytest.importorskip("torch")


def _variants() -> list[str]:
    spec = importlib.util.spec_from_file_location("traps_child", HERE / "traps_child.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.VARIANTS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from kvskill.analyzer.request import AnalyzeRequest
    from kvskill.analyzer.run import analyze
    from kvskill.implementer.apply import ApplyRequest, apply

    work = tmp_path_factory.mktemp("traps")
    source = HERE.parents[1] / "src" / "kvskill" / "embedded" / "runners" / "skeleton_gqa"
    config = source / "config.json"
    shutil.copytree(source / "skel", work / "new" / "skel")
    analyze(AnalyzeRequest(model=str(work / "new" / "skel"), config=config))
    apply(ApplyRequest(str(work / "new" / "skel"), config=config, force=True))
    command = [sys.executable, str(HERE / "traps_child.py"), work / "new" / "skel", source / "skel", config, work]
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, timeout=560, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.parametrize("name", [v for v in _variants() if v.startswith("good")] + ["good: padded left"])
def test_the_converted_runner_agrees(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert found.get("worst", 1.0) < 1e-5, found
    assert found["tokens"] and not found["problems"]


@pytest.mark.parametrize("name", [v for v in _variants() if not v.startswith("good")])
def test_a_naive_formula_does_not(results: dict[str, Any], name: str) -> None:
    found = results[name]
    assert "error" in found or found["worst"] > 1e-3 or not found["tokens"], found


def test_overflow_is_an_error_that_says_what_is_too_long(results: dict[str, Any]) -> None:
    assert results["overflow"]["error"] == "ValueError: row 3 needs 40 positions, the cache has 39"


def test_the_kind_of_error_is_the_operator_s_own(results: dict[str, Any]) -> None:
    """What the operator itself rejects is rejected by name, not by a shape that happens to differ."""
    assert "OperatorRuleViolation" in results["15 no mask"]["error"]




def test_decode_is_one_graph_for_all_steps(results: dict[str, Any]) -> None:
    """Lists of lengths and slots in the metadata neither break the graph nor make a new one for each step."""
    assert results["graph"] == {"same": True, "graphs": 1}
