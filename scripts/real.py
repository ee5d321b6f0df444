"""Acceptance on real input: `python scripts/real.py --git DIR [--only issue3 ...] [--python455 PATH]`.

DIR is a git directory of cann-recipes-infer. Trees are taken out with `git archive` into a temporary folder; nothing
of that repository is kept. Lines live in scripts/real/issueN.py: a module-level LINES, a list of (name, function);
the function takes a Context, returns one line of figures, and raises AssertionError where the line does not hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FRAMEWORK = ("executor", "module")


class SkipLine(Exception):  # noqa: N818
    """The line cannot be run here; the message says what is missing."""


@dataclass
class Context:
    """What a line may use: trees, copies of them, and the command line."""

    git: Path
    work: Path
    python455: str | None = None
    verbose: bool = False
    _trees: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _copies: int = 0

    def tree(self, commit: str, *models: str) -> Path:
        """A pristine tree of `commit` with executor/, module/ and the named models; do not change it."""
        key = (commit, *sorted(models))
        if key not in self._trees:
            dest = self.work / "-".join(("tree", *key))
            dest.mkdir()
            self._extract(commit, dest, [*FRAMEWORK, *(f"models/{m}" for m in models)])
            self._trees[key] = dest
        return self._trees[key]

    def copy(self, commit: str, *models: str) -> Path:
        """A tree of its own, to change."""
        self._copies += 1
        dest = self.work / f"copy-{self._copies}"
        shutil.copytree(self.tree(commit, *models), dest)
        return dest

    def file(self, commit: str, path: str) -> bytes:
        """One file of one commit."""
        return subprocess.run(
            ["git", "-C", str(self.git), "show", f"{commit}:{path}"], check=True, capture_output=True
        ).stdout

    def newest(self) -> str:
        """The newest commit."""
        out = subprocess.run(
            ["git", "-C", str(self.git), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        )
        return out.stdout.strip()

    def kvskill(self, *args: Any, expect: int | None = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run `kvskill ARGS`; asserts the exit code unless `expect` is None."""
        command = [sys.executable, "-m", "kvskill", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
        if self.verbose:
            print("$ kvskill", *args, f"-> {done.returncode}\n{done.stdout}{done.stderr}")
        if expect is not None and done.returncode != expect:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
            raise AssertionError(f"`kvskill {' '.join(map(str, args))}` exits {done.returncode}, not {expect}\n{tail}")
        return done

    def verify(self, *args: Any, expect: int | None = 0) -> dict[str, Any]:
        """The JSON report of `kvskill verify ARGS --json`."""
        done = self.kvskill("verify", *args, "--json", expect=expect)
        return dict(json.loads(done.stdout))

    def old_transformers(self) -> str:
        """An interpreter with transformers 4.55, for trees before 2026-05-09."""
        if self.python455 is None:
            raise SkipLine("needs --python455, an interpreter with torch and transformers 4.55")
        return self.python455

    def _extract(self, commit: str, dest: Path, paths: list[str]) -> None:
        command = ["git", "-C", str(self.git), "archive", commit, *paths]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise AssertionError(f"git archive {commit}: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(dest, filter="data")


def load_lines(only: list[str]) -> list[tuple[str, str, Any]]:
    """(issue, name, function) of every registered line."""
    out = []
    for path in sorted((HERE / "real").glob("issue*.py")):
        if only and path.stem not in only:
            continue
        spec = importlib.util.spec_from_file_location(f"real_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        out += [(path.stem, name, function) for name, function in module.LINES]
    return out


def main() -> int:
    """Run the lines, print a table, exit 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--git", "--cri-git", dest="git", required=True, type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--line", help="only lines whose name contains this text")
    parser.add_argument("--python455", default=os.environ.get("KVSKILL_PYTHON455"))
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    rows, failed = [], 0
    with tempfile.TemporaryDirectory(prefix="kvskill-real-") as work:
        context = Context(options.git.resolve(), Path(work), options.python455, options.verbose)
        for issue, name, function in load_lines(options.only):
            if options.line and options.line not in name:
                continue
            start = time.monotonic()
            try:
                status, figures = "ok", function(context) or ""
            except SkipLine as skip:
                status, figures = "skipped", str(skip)
            except AssertionError as error:
                status, figures = "FAIL", str(error)
            except Exception:
                status, figures = "FAIL", traceback.format_exc()
            failed += status == "FAIL"
            rows.append((issue, name, status, time.monotonic() - start, figures))
            print(f"{issue:8} {status:8} {time.monotonic() - start:6.1f} s  {name}: {figures}", flush=True)
    print(f"\n{len(rows)} lines, {failed} failed, {sum(r[2] == 'skipped' for r in rows)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
