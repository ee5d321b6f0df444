"""Checks of runs that draft tokens: the model's choices, and which Legacy drafts may be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvskill.verifier.judge import _draft_check, _greedy_checks


def _arrays(name: str, rows: dict[int, dict[int, list[float]]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    at = "positions" if name == "logits" else f"{name}_positions"
    for request, logits in rows.items():
        out[f"{at}/{request}"] = np.array(sorted(logits))
        out[f"{name}/{request}"] = np.array([logits[p] for p in sorted(logits)], dtype=np.float32)
    return out


def test_another_choice_fails_and_a_tie_does_not() -> None:
    reference = {"HF": _arrays("logits", {0: {4: [1.0, 3.0], 5: [2.0, 2.00001]}})}
    same = _arrays("logits", {0: {4: [1.0, 3.0], 5: [2.00001, 2.0]}})
    assert [c.ok for c in _greedy_checks(reference, same, 1e-4)] == [True]
    other = _arrays("logits", {0: {4: [3.1, 3.0], 5: [2.0, 2.1]}})
    assert [c.ok for c in _greedy_checks(reference, other, 1e-4)] == [False]


def test_nothing_in_common_is_no_agreement() -> None:
    reference = {"HF": _arrays("logits", {0: {4: [1.0, 3.0]}})}
    assert [c.ok for c in _greedy_checks(reference, _arrays("logits", {0: {9: [1.0, 3.0]}}), 1e-4)] == [False]


def test_padded_engines_draft_rightly_for_their_longest_prompt_only() -> None:
    work: Any = SimpleNamespace(prompts=(5, 17))
    legacy = _arrays("draft", {0: {4: [9.0, 9.0]}, 1: {16: [1.0, 2.0]}})
    paged = _arrays("draft", {0: {4: [1.0, 1.0]}, 1: {16: [1.0, 2.0]}})
    packed: Any = SimpleNamespace(arrays=legacy, result={"padded": False})
    padded: Any = SimpleNamespace(arrays=legacy, result={"padded": True})
    assert not _draft_check(packed, paged, work, 1e-4).ok
    found = _draft_check(padded, paged, work, 1e-4)
    assert found.ok and "longest prompt" in found.text
    paged["draft/1"] = paged["draft/1"] + 1
    assert not _draft_check(padded, paged, work, 1e-4).ok
