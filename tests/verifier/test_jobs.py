"""A child that crashes, hangs, eats memory or talks without end becomes an Outcome, never a traceback of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvskill.diagnostics import InputError
from kvskill.verifier import jobs
from kvskill.verifier.diagnose import child_finding
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.jobs import Child, Outcome, run_children
from kvskill.verifier.options import Limits

PROLOGUE = "import json, sys; from pathlib import Path; job = json.loads(Path(sys.argv[2]).read_text())\n"
LIMITED = PROLOGUE + "import resource; resource.setrlimit(resource.RLIMIT_DATA, (job['memory_mb'] << 20,) * 2)\n"
GOOD = "Path(job['out'], 'result.json').write_text(json.dumps({'error': None, 'phase': 'done'}))\n"
MODEL = ModelUnderTest(
    root=Path("r"), folder=Path("r/models/m"), name="m", modeling_module="models.m.modeling_m", causal_lm="M",
    config_module=None, config_class=None,
)  # fmt: skip


def outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float = 30, memory: int = 0
) -> Outcome:
    script = tmp_path / "child.py"
    script.write_text(body)
    monkeypatch.setattr(jobs, "_BOOTSTRAP", script)
    child = Child("paged", {"role": "paged", "out": str(tmp_path / "out")})
    return run_children([child], Limits(seconds, memory))["paged"]


def test_a_good_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(tmp_path, monkeypatch, PROLOGUE + GOOD).ok


@pytest.mark.parametrize(
    ("body", "seconds", "code", "word"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 30, "KV409", "SIGSEGV"),
        ("import sys; sys.exit(3)", 30, "KV409", "status 3"),
        ("while True: pass", 1, "KV408", "no result after 1 s"),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", 1, "KV408", "no result"),
        ("import subprocess; subprocess.run(['sleep', '60'])", 1, "KV408", "no result"),
    ],
    ids=["segfault", "exit", "hang", "deaf", "grandchild"],
)
def test_a_child_that_dies_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, code: str, word: str
) -> None:
    found = outcome(tmp_path, monkeypatch, body, seconds)
    assert not found.ok
    finding = child_finding(found, MODEL, "Paged")
    assert finding.code == code
    assert word in finding.fact


def test_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = LIMITED + "x = bytearray(1 << 31)\n" + GOOD
    found = outcome(tmp_path, monkeypatch, body, memory=512)
    assert not found.ok
    assert "MemoryError" in found.log


def _failed(**error: Any) -> Outcome:
    return Outcome("paged", {"phase": "run", "error": {"message": "m", "trace": "t", **error}})


def test_exceptions_are_told_apart() -> None:
    place = {"file": "models/m/modeling_m.py", "line": 7, "code": ""}
    target = {"target": place, "model": place}

    def code(**error: Any) -> str:
        return child_finding(_failed(**target, **error), MODEL, "Paged").code

    assert code(type="OperatorRuleViolation", rule="fa-heads", code="KV453") == "KV453"
    assert code(type="UnregisteredGroup") == "KV420"
    assert code(type="MissingKernel") == "KV432"
    assert code(type="MemoryError") == "KV409"
    assert code(type="ZeroDivisionError") == "KV407"
    finding = child_finding(_failed(type="ZeroDivisionError", **target), MODEL, "Paged")
    assert str(finding.span) == "models/m/modeling_m.py:7:1"


def test_what_is_not_the_targets_fault_is_not_blamed_on_it() -> None:
    nowhere = {"target": None, "model": None}
    with pytest.raises(InputError) as caught:
        child_finding(_failed(type="BackendError", **nowhere), MODEL, "Paged")
    assert caught.value.findings[0].code == "KV436"
    with pytest.raises(RuntimeError):
        child_finding(_failed(type="AttributeError", **nowhere), MODEL, "Paged")
    place = {"file": "models/m/modeling_m.py", "line": 7, "code": ""}
    with pytest.raises(InputError) as caught:
        error = {"type": "ImportError", "message": "cannot import name 'X' from 'transformers.y'"}
        child_finding(Outcome("paged", {"error": {**error, "target": place, "model": place}}), MODEL, "Paged")
    assert caught.value.findings[0].code == "KV437"


def test_describe_finds_the_place_in_the_tree(tmp_path: Path) -> None:
    from kvskill.verifier.child.main import describe

    path = tmp_path / "models" / "m" / "modeling_m.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n    raise ValueError('x')\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    try:
        scope["f"]()
    except ValueError as error:
        found = describe(error, {"trees": [str(tmp_path)], "folder": str(path.parent)})
    assert found["model"]["file"] == "models/m/modeling_m.py" and found["model"]["line"] == 2
    assert json.dumps(found)
