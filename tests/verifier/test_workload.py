"""The workload: the same for the same seed, in waves, past the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvskill.verifier.modelconfig import SmallConfig
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.workload import make_workload


def work(window: int | None = None, **kwargs: Any) -> Any:
    small = SmallConfig({"vocab_size": 50}, window, 2, ())
    return make_workload(VerifyOptions(model=Path("m"), **kwargs), small)


def test_same_seed_same_tokens() -> None:
    assert work(seed=1) == work(seed=1)
    assert work(seed=1).tokens != work(seed=2).tokens


def test_special_tokens_are_not_used() -> None:
    assert all(3 <= t < 50 for row in work().tokens for t in row)


def test_waves_hold_at_most_a_batch_and_every_request() -> None:
    found = work(batch_size=3)
    assert found.waves == ((0, 1, 2), (3,))
    assert len(found.waves) > 1, "more requests than slots, so that blocks are reused"


@pytest.mark.parametrize("window", [20, 128])
def test_a_window_is_crossed_with_two_blocks_to_its_left(window: int) -> None:
    found = work(window)
    assert (max(found.prompts) - window) // 16 >= 2
    assert not found.notes
    assert max(work(window, long=True).prompts) > 3 * window + 2 * 16


def test_what_was_not_tested_is_said() -> None:
    assert "window" in work(128, prompts=(5, 1)).notes[0]
    assert "block" in work(prompts=(5, 1), decode_steps=2).notes[0]
