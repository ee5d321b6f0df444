"""Every conversion that reports success agrees with transformers: same weights, float32, in child processes.

Prompts of unequal lengths in two waves, 24 decode steps over small blocks; `long` cases add a prompt beyond three
windows, and cases with more than one rank run on two as well. One case takes some ten seconds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvskill.diagnostics import Refusal

CASES = Path(__file__).resolve().parents[1] / "cases"


def runs() -> list[Any]:
    out = []
    for path in sorted(CASES.glob("*/case.yaml")):
        case, name = yaml.safe_load(path.read_text(encoding="utf-8")), path.parent.name
        if case["expect"] == "convert":
            out += [pytest.param(name, tp, bool(case["long"]) and tp == 1, id=f"{name}-tp{tp}") for tp in case["tp"]]
    return out


@pytest.mark.parametrize(("name", "tp", "long"), runs())
def test_agrees_with_transformers(case_bench: Callable[..., Any], name: str, tp: int, long: bool) -> None:
    b = case_bench(name)
    try:
        b.convert()
    except Refusal:
        pytest.skip("refused: test_cases.py says which cases may be")
    command = [sys.executable, "-m", "kvskill", "verify", name, "--repo", str(b.tree), "--against", "hf", "--fast"]
    command += ["--tp", str(tp), *(["--long"] if long else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "result: agrees" in done.stdout
