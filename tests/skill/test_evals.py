"""The evaluation files are usable: balanced queries, tasks on real cases, assertions that can fail."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_assertions", ROOT / "evals/run_assertions.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNNER = script()
TASKS = RUNNER.load_tasks()
QUERIES = json.loads((ROOT / "evals/trigger_queries.json").read_text(encoding="utf-8"))


def test_queries_are_balanced() -> None:
    assert len({q["query"] for q in QUERIES}) == len(QUERIES) == 40
    count = Counter((q["lang"], q["should_trigger"]) for q in QUERIES)
    assert set(count.values()) == {10}
    held_out = [q for q in QUERIES if q["split"] == "validation"]
    assert 12 <= len(held_out) <= 20 and 0.4 <= sum(q["should_trigger"] for q in held_out) / len(held_out) <= 0.6
    chinese = re.compile(r"[\u4e00-\u9fff]")
    assert all(bool(chinese.search(q["query"])) == (q["lang"] == "zh") for q in QUERIES)


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_tasks_can_be_set_up_and_checked(task: dict) -> None:  # type: ignore[type-arg]
    case = ROOT / "tests/cases" / task["setup"]["case"]
    assert (case / "case.yaml").is_file()
    kinds = {"file", "run", "matches", "lacks", "only_below", "unchanged", "transcript"}
    for assertion in task["assertions"]:
        assert assertion["kind"] in kinds and assertion["text"]
        re.compile(assertion.get("pattern", ""))
        if "path" in assertion:
            assert (case / assertion["path"]).exists() or assertion["path"].endswith("kv_manifest.yaml")


def test_untouched_workspace_fails_a_conversion_and_passes_a_refusal(tmp_path: Path) -> None:
    task = TASKS["convert-dense"]
    RUNNER.prepare(task, tmp_path / "work")
    result = RUNNER.grade(task, tmp_path / "work", "no commands", fast=True)
    assert result["summary"]["passed"] == 0, result
    refusal = {"id": "x", "assertions": [{"kind": "unchanged", "path": "models", "text": "x"}]}
    assert RUNNER.grade(refusal, tmp_path / "work", None, fast=True)["summary"]["failed"] == 0


def test_changes_and_transcript_are_seen(tmp_path: Path) -> None:
    RUNNER.prepare(TASKS["convert-dense"], tmp_path / "work")
    model = next((tmp_path / "work/models/qwen3/models").glob("modeling_*.py"))
    model.write_text(model.read_text() + "# edited\n")
    name = model.relative_to(tmp_path / "work").as_posix()
    assertions = [
        {"kind": "only_below", "path": "models/qwen3", "text": "inside"},
        {"kind": "unchanged", "path": "models/qwen3", "text": "unchanged"},
        {"kind": "matches", "path": name, "pattern": "^# edited$", "text": "matches"},
        {"kind": "lacks", "path": name, "pattern": "^# edited$", "text": "lacks"},
        {"kind": "transcript", "pattern": "^\\$ kvskill apply", "text": "transcript"},
        {"kind": "run", "args": ["--version"], "exit": 0, "text": "run"},
        {"kind": "run", "args": ["no-such-command"], "exit": 0, "text": "run wrong"},
        {"kind": "file", "path": "none", "text": "file"},
    ]
    text = "thinking\n$ kvskill apply models/qwen3\nok\n"
    result = RUNNER.grade({"id": "x", "assertions": assertions}, tmp_path / "work", text, fast=False)
    passed = [r["passed"] for r in result["expectations"]]
    assert passed == [True, False, True, False, True, True, False, False], result
    assert result["transcript"] == {"commands": 1, "characters": len(text)}
    (tmp_path / "work/executor/new.py").write_text("x = 1\n")
    again = RUNNER.grade({"id": "x", "assertions": assertions[:1]}, tmp_path / "work", text, fast=False)
    assert again["summary"]["failed"] == 1
