"""How long analyze and apply take, as ratios within one run: `python scripts/bench.py [--runs N] [--torchfix PATH]`.

Compared are whole processes on the same modeling file, run in turn so that a busy machine hits all of them:

* floor: libcst alone: import, parse, resolve scopes, qualified names and positions, print the code back;
* torchfix: a public libcst-based fixer with all its rules, when its executable is given or on PATH;
* kvskill analyze (reads config, YAML files, the target's source and the modeling file), apply --diff, and both.

Measured is processor time (user and system, child processes included), which a busy machine disturbs less than the
clock. The time of an empty Python process is taken off everywhere. Nothing is asserted: seconds depend on the
machine, ratios much less.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kvskill.embedded import MODELS, materialise

FLOOR = """
import sys, libcst
from libcst import metadata as m
text = open(sys.argv[1], "rb").read()
wrapper = m.MetadataWrapper(libcst.parse_module(text))
wrapper.resolve_many([m.ScopeProvider, m.QualifiedNameProvider, m.PositionProvider])
assert wrapper.module.bytes == text
"""


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass
class Contender:
    """One command; `seconds` of each run, without interpreter start."""

    name: str
    argv: list[str]
    cwd: Path
    ok: tuple[int, ...] = (0,)
    seconds: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Processor seconds of one process; fails loudly when it fails."""
        env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        start = _children()
        result = subprocess.run(self.argv, cwd=self.cwd, env=env, capture_output=True, text=True)
        spent = _children() - start
        if result.returncode not in self.ok:
            raise SystemExit(
                f"{self.name} returned {result.returncode}:\n{result.stdout[-500:]}\n{result.stderr[-1500:]}"
            )
        return spent


def contenders(repo: Path, model: str, torchfix: str | None) -> list[Contender]:
    """The floor first, then the others."""
    source = str(repo / "models" / model / "models" / f"modeling_{model}.py")
    kvskill = [sys.executable, "-m", "kvskill"]
    out = [Contender("libcst parse + metadata + print", [sys.executable, "-c", FLOOR, source], repo)]
    if torchfix:
        argv = [torchfix, "--select", "ALL", "-j", "1", source]
        out.append(Contender("torchfix, all rules", argv, repo, ok=(0, 1)))
    out.append(Contender("kvskill analyze", [*kvskill, "analyze", model], repo))
    out.append(Contender("kvskill apply --diff", [*kvskill, "apply", model, "--diff"], repo))
    return out


def main() -> int:
    """Print one table per model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--torchfix", default=shutil.which("torchfix"), help="executable of torchfix")
    parser.add_argument("--model", choices=[*MODELS], action="append")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for model in args.model or ["tiny_dense", "tiny_moe2d"]:
            repo = materialise(Path(folder) / model, "2026-04", [model])
            _table(model, repo, contenders(repo, model, args.torchfix), args.runs)
    if not args.torchfix:
        print("torchfix was not measured: it is not on PATH (give --torchfix)")
    return 0


def _table(model: str, repo: Path, everyone: list[Contender], runs: int) -> None:
    empty = Contender("empty process", [sys.executable, "-c", "pass"], repo)
    for contender in (empty, *everyone):
        contender.run()  # fills caches; apply needs the manifest that analyze writes
    for _ in range(runs):
        for contender in (empty, *everyone):
            contender.seconds.append(contender.run())
    base = statistics.median(empty.seconds)
    lines = (repo / "models" / model / "models" / f"modeling_{model}.py").read_bytes().count(b"\n")
    rows = [(c.name, statistics.median(c.seconds) - base) for c in everyone]
    rows.append(("kvskill analyze + apply", sum(seconds for name, seconds in rows if name.startswith("kvskill"))))
    print(f"\n{model}: modeling file of {lines} lines; processor time, median of {runs}")
    print(f"  taken off everywhere: {base * 1e3:.0f} ms of an empty Python process")
    for name, seconds in rows:
        print(f"  {name:<34} {seconds * 1e3:8.0f} ms   {seconds / rows[0][1]:6.2f} x floor")


if __name__ == "__main__":
    sys.exit(main())
