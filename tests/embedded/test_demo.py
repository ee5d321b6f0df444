"""The demo end to end: analyze, apply and verify on embedded models, in every paged API era."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvskill import demo as demo_module
from kvskill.cli.demo import demo
from kvskill.demo import Demo, run_demo


def run(*argv: str, timeout: int = 420) -> subprocess.CompletedProcess[str]:
    """`kvskill demo` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "kvskill", "demo", *argv], capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize(
    ("model", "era"),
    [("tiny_dense", "2026-04"), ("tiny_dense", "2026-06"), ("tiny_moe2d", "2026-06"), ("tiny_mixed", "2026-08")],
)
def test_a_model_is_converted_and_agrees(model: str, era: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = run("--model", model, "--era", era, "--keep", str(tmp_path / "kept"))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert f"{model}: convert to Paged" in result.stdout  # the manifest's summary
    assert "+++ " in result.stdout and "npu_fused_infer_attention_score_v2" in result.stdout  # the diff
    assert "the Legacy code" in result.stdout.splitlines()[-2]
    table = [line.split() for line in result.stdout.splitlines() if line.startswith(("HF ", "Legacy "))]
    assert {row[0] for row in table} == {"HF", "Legacy"}
    assert len(table) >= 8 and all(row[-1] == "agrees" for row in table)
    assert "Not proved: anything on an NPU (not run)" in result.stdout
    kept = tmp_path / "kept" / "target" / "models" / model
    assert (kept / "kv_manifest.yaml").is_file()
    assert "get_cache_info" in (kept / "models" / f"modeling_{model}.py").read_text(encoding="utf-8")


def test_a_failing_step_stops_the_demo_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def step(run: Demo, number: str, argv: list[str]) -> int:
        calls.append(argv)
        return 3 if argv == ["apply"] else 0

    monkeypatch.setattr(demo_module, "_step", step)
    assert run_demo(Demo(tmp_path / "a", "tiny_dense", "2026-04")) == 3
    assert calls == [["analyze"], ["apply", "--diff"], ["apply"]]


def test_the_diff_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('--- a'); print('+++ b'); [print('+line', i) for i in range(300)]"
    monkeypatch.setattr(Demo, "command", lambda self, *args: [sys.executable, "-c", script])
    monkeypatch.setattr(demo_module, "_closing", lambda run: "")
    cut = CliRunner().invoke(demo, ["--keep", str(tmp_path / "a")], standalone_mode=False)
    assert "122 more lines; all of them with --full-diff" in cut.output
    full = CliRunner().invoke(demo, ["--keep", str(tmp_path / "b"), "--full-diff"], standalone_mode=False)
    assert "+line 299" in full.output and "more lines" not in full.output


def test_nothing_compared_is_not_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "_step", lambda run, number, argv: 0)
    assert run_demo(Demo(tmp_path / "a", "tiny_dense", "2026-04")) == 1


@pytest.mark.parametrize(("oracles", "text"), [({"HF"}, "what\ntransformers computed"), ({"HF", "Legacy"}, "and the")])
def test_the_closing_line_names_only_what_was_compared(oracles: set[str], text: str, tmp_path: Path) -> None:
    assert text in demo_module._closing(Demo(tmp_path, "tiny_dense", "2026-04", oracles=oracles))


def test_a_folder_with_content_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    result = run("--keep", str(tmp_path))
    assert result.returncode == 2 and "not empty" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
