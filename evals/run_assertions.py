#!/usr/bin/env python3
"""Make the workspace of an evaluation task, and check its assertions. Needs a checkout and kvskill installed.

run_assertions.py list
run_assertions.py prepare TASK DIR
run_assertions.py check TASK DIR [--transcript FILE] [--fast] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvskill.embedded import materialise

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "tests/cases"
_IGNORED = (".git", "__pycache__", ".kvskill", "kv_manifest.yaml")


def load_tasks() -> dict[str, dict[str, Any]]:
    """The tasks by id."""
    data = json.loads((HERE / "evals.json").read_text(encoding="utf-8"))
    return {task["id"]: task for task in data["evals"]}


def kvskill(args: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of the interpreter that runs this script."""
    code = "from kvskill.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, check=False)


def state(root: Path) -> dict[str, str]:
    """sha256 by relative path, without what the tool and git keep for themselves."""
    out = {}
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(p in _IGNORED for p in parts):
            out["/".join(parts)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out


def prepare(task: dict[str, Any], root: Path) -> None:
    """Write the target repository, the case's model and config, and remember the state beside `root`."""
    setup = task["setup"]
    materialise(root, era=setup["era"], models=())
    case = CASES / setup["case"]
    shutil.copytree(case / "models", root / "models", dirs_exist_ok=True)
    if (case / "config.json").exists():
        shutil.copy(case / "config.json", root / "config.json")
    if setup.get("git"):
        git = ["git", "-c", "user.name=eval", "-c", "user.email=eval@example.invalid"]
        for args in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
            subprocess.run([*git, *args], cwd=root, check=True)
    if "append" in setup:
        target = root / setup["append"]["path"]
        target.write_text(target.read_text(encoding="utf-8") + setup["append"]["text"], encoding="utf-8")
    for args in setup.get("run", []):
        done = kvskill(args, root)
        if done.returncode != 0:
            raise SystemExit(f"set-up failed: kvskill {' '.join(args)}: {done.stdout}{done.stderr}")
    _before(root).write_text(json.dumps(state(root)), encoding="utf-8")


def _before(root: Path) -> Path:
    return root.with_name(root.name + ".before.json")


class Checker:
    """Checks the assertions of one finished workspace; each check returns (passed, evidence)."""

    def __init__(self, root: Path, transcript: str | None) -> None:
        self._root = root
        self._transcript = transcript
        before: dict[str, str] = json.loads(_before(root).read_text(encoding="utf-8"))
        now = state(root)
        self._changed = sorted(p for p in {*before, *now} if before.get(p) != now.get(p))

    def check(self, assertion: dict[str, Any]) -> tuple[bool, str]:
        """One assertion. Raises KeyError for an unknown kind."""
        checks: dict[str, Callable[[dict[str, Any]], tuple[bool, str]]] = {
            "file": self._file,
            "run": self._run,
            "matches": self._matches,
            "lacks": self._lacks,
            "only_below": self._only_below,
            "unchanged": self._unchanged,
            "transcript": self._in_transcript,
        }
        return checks[assertion["kind"]](assertion)

    def _file(self, a: dict[str, Any]) -> tuple[bool, str]:
        path = self._root / a["path"]
        return path.is_file(), f"{a['path']} {'exists' if path.is_file() else 'is missing'}"

    def _run(self, a: dict[str, Any]) -> tuple[bool, str]:
        done = kvskill(a["args"], self._root)
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
        return done.returncode == a["exit"], f"exit {done.returncode}, wanted {a['exit']}: {tail[0][:200]}"

    def _matches(self, a: dict[str, Any]) -> tuple[bool, str]:
        text = (self._root / a["path"]).read_text(encoding="utf-8")
        found = re.search(a["pattern"], text, re.MULTILINE)
        line = text[: found.start()].count("\n") + 1 if found else 0
        return bool(found), f"line {line}" if found else "no match"

    def _lacks(self, a: dict[str, Any]) -> tuple[bool, str]:
        found, evidence = self._matches(a)
        return not found, evidence

    def _only_below(self, a: dict[str, Any]) -> tuple[bool, str]:
        inside = [p for p in self._changed if p.startswith(a["path"] + "/")]
        outside = [p for p in self._changed if p not in inside]
        return bool(inside) and not outside, f"{len(inside)} changed inside, outside: {outside[:5]}"

    def _unchanged(self, a: dict[str, Any]) -> tuple[bool, str]:
        inside = [p for p in self._changed if p.startswith(a["path"] + "/")]
        return not inside, f"changed: {inside[:5]}"

    def _in_transcript(self, a: dict[str, Any]) -> tuple[bool, str]:
        if self._transcript is None:
            return False, "no transcript was given"
        found = re.search(a["pattern"], self._transcript, re.MULTILINE)
        return bool(found), repr(found.group()[:100]) if found else "no match"


def grade(task: dict[str, Any], root: Path, transcript: str | None, fast: bool) -> dict[str, Any]:
    """The grading of a workspace, with the figures of the transcript."""
    checker = Checker(root, transcript)
    rows = []
    for assertion in task["assertions"]:
        if fast and assertion.get("slow"):
            rows.append({"text": assertion["text"], "passed": False, "evidence": "not run (--fast)"})
            continue
        passed, evidence = checker.check(assertion)
        rows.append({"text": assertion["text"], "passed": passed, "evidence": evidence})
    passed_count = sum(r["passed"] for r in rows)
    commands = re.findall(r"^\$ .*$", transcript or "", re.MULTILINE)
    return {
        "task": task["id"],
        "expectations": rows,
        "summary": {"passed": passed_count, "failed": len(rows) - passed_count, "total": len(rows)},
        "transcript": {"commands": len(commands), "characters": len(transcript or "")},
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    sub.add_parser("list")
    for name in ("prepare", "check"):
        one = sub.add_parser(name)
        one.add_argument("task", choices=list(load_tasks()))
        one.add_argument("dir", type=Path)
        if name == "check":
            one.add_argument("--transcript", type=Path)
            one.add_argument("--fast", action="store_true", help="leave out the slow assertions (they then fail)")
            one.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.command == "list":
        for task in load_tasks().values():
            print(f"{task['id']}: {task['prompt']}")
        return 0
    task = load_tasks()[args.task]
    if args.command == "prepare":
        prepare(task, args.dir)
        print(f"{args.dir}: {task['prompt']}")
        return 0
    transcript = args.transcript.read_text(encoding="utf-8") if args.transcript else None
    result = grade(task, args.dir, transcript, args.fast)
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        for row in result["expectations"]:
            print(f"{'PASS' if row['passed'] else 'FAIL'} {row['text']}: {row['evidence']}")
        summary = result["summary"]
        print(f"{summary['passed']}/{summary['total']} passed; transcript: {result['transcript']}")
    return 0 if result["summary"]["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
