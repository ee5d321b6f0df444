"""The demo: an embedded Legacy model goes through analyze, apply and verify in a folder of its own.

Every step runs the command a user would type, as a child process with the same interpreter, and its output is
shown as it is (the diff is cut unless asked for in full).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click

from kvskill.diagnostics import ExitCode
from kvskill.embedded import ERAS, MODELS, materialise

__all__ = ["Demo", "run_demo"]

PADDED_ERA = "2026-03"  # 2-D batches: such a model's before-state runs in a tree of its own
DIFF_LINES = 180
_TABLE_ROW = re.compile(r"(HF|Legacy) .* agrees$")


@dataclass
class Demo:
    """One run. `era` is the API of the target repository that the model is converted for."""

    folder: Path
    model: str
    era: str
    full_diff: bool = False
    oracles: set[str] = field(default_factory=set)  # what verify's table compared with

    @property
    def repo(self) -> Path:
        """The target repository."""
        return self.folder / "target"

    @property
    def before(self) -> Path | None:
        """The tree in which the Legacy form runs, where that is another one."""
        return self.folder / "before" if MODELS[self.model].era == PADDED_ERA else None

    def set_up(self) -> None:
        """Write the target repository, and the tree of the before-state where one is needed."""
        materialise(self.repo, self.era, [self.model])
        if self.before is not None:
            materialise(self.before, PADDED_ERA, [self.model])

    def command(self, *args: str) -> list[str]:
        """argv of one step."""
        return [sys.executable, "-m", "kvskill", args[0], f"models/{self.model}", *args[1:]]


def run_demo(demo: Demo) -> int:
    """Run all steps and return the exit code: 0 only if every step returned 0."""
    model = MODELS[demo.model]
    demo.set_up()
    click.echo(f"Model:  {model.name} ({model.summary}), Legacy KV cache")
    click.echo(f"Target: an embedded repository with the API of {demo.era}")
    click.echo(f"Folder: {demo.folder}")
    before = ["--before-repo", str(demo.before)] if demo.before else []
    verify = ["verify", *model.verify, *before]
    steps = [["analyze"], ["apply", "--diff"], ["apply"], verify]
    for number, step in enumerate(steps, start=1):
        code = _step(demo, f"{number}/{len(steps)}", step)
        if code != ExitCode.DONE:
            click.echo(f"\nStopped: `kvskill {' '.join(step)}` returned {code}. Nothing was proved.", err=True)
            return code
    if not demo.oracles:
        click.echo("\nStopped: verify compared with nothing, so nothing was proved.", err=True)
        return int(ExitCode.FOUND)
    click.echo(_closing(demo))
    return int(ExitCode.DONE)


def _step(demo: Demo, number: str, step: list[str]) -> int:
    shown = f"kvskill {step[0]} models/{demo.model} {' '.join(step[1:])}".rstrip()
    click.echo()
    click.secho(f"[{number}] {shown}", bold=True)
    sys.stdout.flush()
    argv = demo.command(*step)
    process = subprocess.Popen(argv, cwd=demo.repo, env=_env(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    is_diff, count = "--diff" in step, 0
    for raw in process.stdout:
        line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
        count += 1
        if step[0] == "verify" and (row := _TABLE_ROW.match(line)):
            demo.oracles.add(row[1])
        if not is_diff:
            click.echo(line)
        elif demo.full_diff or count <= DIFF_LINES:
            click.echo(_coloured(line))
    if is_diff and count > DIFF_LINES and not demo.full_diff:
        click.echo(f"... {count - DIFF_LINES} more lines; all of them with --full-diff")
    return process.wait()


def _coloured(line: str) -> str:
    """Colours of a unified diff; click drops them where the output is not a terminal."""
    if "\x1b" in line:
        return line
    for prefixes, style in (
        (("+++", "---", "diff "), {"bold": True}),
        (("@@",), {"fg": "cyan"}),
        (("+",), {"fg": "green"}),
        (("-",), {"fg": "red"}),
    ):
        if line.startswith(prefixes):
            return click.style(line, **style)
    return line


def _env() -> dict[str, str]:
    """An installed torch_npu without CANN breaks `import torch` unless it is told not to load itself."""
    return {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONUTF8": "1"}


def _closing(demo: Demo) -> str:
    names = {"HF": "transformers", "Legacy": "the Legacy code" + (" (in its own tree)" if demo.before else "")}
    compared = " and ".join(names[oracle] for oracle in sorted(demo.oracles))
    return (
        f"\nProved on this CPU, in float32 with random weights: the converted {demo.model} computes what\n"
        f"{compared} computed, to the figures above.\n"
        "Not proved: anything on an NPU (not run), speed, bfloat16 rounding."
    )


def eras() -> list[str]:
    """The API eras that a model can be converted for."""
    return [era for era in ERAS if era != PADDED_ERA]
