"""The command line of verify: exit codes and messages before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvskill.diagnostics import Diagnostic, ExitCode, Severity, Span
from kvskill.verifier.compare import Comparison
from kvskill.verifier.report import VerifyReport


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvskill", "verify", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_such_model_is_exit_2(tmp_path: Path) -> None:
    done = run(tmp_path / "nothing")
    assert done.returncode == ExitCode.CANNOT_RUN
    assert "KV430" in done.stderr


@pytest.mark.parametrize("prompts", ["5,x", "0,3", ""])
def test_wrong_prompts_are_a_usage_error(prompts: str) -> None:
    assert run("m", "--prompts", prompts).returncode == ExitCode.CANNOT_RUN


def _comparison(relative: float) -> Comparison:
    return Comparison("HF", 0, 5, 25, relative, 0, 1e-4, None, outliers=int(relative > 1e-4))


def test_exit_code_of_a_report() -> None:
    report = VerifyReport("m", "r", 1)
    assert report.exit_code == ExitCode.CANNOT_RUN, "nothing compared is not agreement"
    report.comparisons = [_comparison(1e-6)]
    assert report.exit_code == ExitCode.DONE
    report.findings = [Diagnostic("KV456", Severity.WARNING, "f.", "t.", Span("m"))]
    assert report.exit_code == ExitCode.DONE
    report.findings = [Diagnostic("KV400", Severity.ERROR, "f.", "t.", Span("m"))]
    assert report.exit_code == ExitCode.FOUND
    assert report.to_json()["exit_code"] == 1
