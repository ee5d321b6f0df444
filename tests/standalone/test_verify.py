"""Case folders, converted by the command's own code and verified by `kvskill verify` in child processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvskill.diagnostics import ExitCode
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.run import verify_model

pytest.importorskip("torch")
pytest.importorskip("transformers")


def _options(folder: Any, **more: Any) -> VerifyOptions:
    options = VerifyOptions(model=folder.model, config=folder.config, prompts=(5, 2, 17), decode_steps=12)
    return replace(options, **more)


@pytest.mark.parametrize("name", ["skeleton_gqa", "skeleton_sliding", "skeleton_minibatch"])
def test_case_agrees_with_its_before_state_and_hf(case: Callable[[str], Any], name: str) -> None:
    folder = case(name)
    folder.convert()
    report = verify_model(_options(folder))
    assert report.exit_code is ExitCode.DONE, [str(f) for f in report.findings]
    oracles = {c.oracle for c in report.comparisons}
    assert oracles == {"old, right", "old, left", "HF, right", "HF, left"}
    assert max(c.relative for c in report.comparisons) < 1e-5
    assert all(check.ok for check in report.checks) and len(report.checks) == 10
    assert any("decode step, median" in n and "old" in n and "new" in n for n in report.notes)


def test_a_wrong_runner_is_found(case: Callable[[str], Any]) -> None:
    folder = case("skeleton_gqa")
    folder.convert()
    folder.replace("runner_skel.py", "(self.blocks_per_row * self.block_size)", "self.max_seq_len")
    report = verify_model(_options(folder))
    assert report.exit_code is ExitCode.FOUND
    assert any("block_table" in f.fact or f.code in ("KV400", "KV409") for f in report.findings)
