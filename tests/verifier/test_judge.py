"""Ranks: agreement needs something that was compared, and one failed rank is a failed run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvskill.verifier import judge as module
from kvskill.verifier.jobs import Outcome
from kvskill.verifier.judge import judge

LOGITS = {"positions/0": np.array([4]), "logits/0": np.array([[1.0, 2.0]], dtype=np.float32)}


def plan(tp: int = 2) -> Any:
    work = SimpleNamespace(prompts=(5,), steps=1, seed=1, notes=[], block_size=16)
    return SimpleNamespace(options=SimpleNamespace(tp=tp, mtp=0, checks=True, dtype="fp32", tolerance=None), work=work)


@pytest.mark.parametrize(
    ("second", "ok"),
    [
        (LOGITS, True),
        ({}, False),
        ({**LOGITS, "logits/0": np.array([[1.0, 2.5]], dtype=np.float32)}, False),
        ({**LOGITS, "logits/0": np.array([[1.0, np.nan]], dtype=np.float32)}, False),
    ],
    ids=["same", "nothing", "other", "nan"],
)
def test_ranks_agree_only_where_all_have_the_same_logits(second: dict[str, Any], ok: bool) -> None:
    outcomes = {"paged": Outcome("paged", arrays=LOGITS), "paged1": Outcome("paged", arrays=second)}
    check = next(c for c in module._rank_checks(plan(), outcomes) if c.name == "run.ranks-agree")
    assert check.ok is ok, check.text


def test_a_failed_rank_is_reported_although_rank_0_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_setup", "_party", "_hf_party", "_legacy_party"):
        monkeypatch.setattr(module, name, lambda *a: "")
    monkeypatch.setattr(module, "child_finding", lambda outcome, model, shown: f"{shown}: {outcome.died}")
    given = plan()
    given.model = SimpleNamespace(shown="m.py", root=SimpleNamespace(name="r"))
    given.small = SimpleNamespace(notes=[])
    outcomes = {"paged": Outcome("paged", arrays=LOGITS), "paged1": Outcome("paged", died="exit 1")}
    report = judge(given, outcomes)
    assert "Paged rank 1: exit 1" in report.findings
