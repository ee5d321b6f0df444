"""Starts child processes, bounds them, and reads what they left.

A child that crashes, hangs or runs out of memory leaves an Outcome with a reason; it never takes the parent down.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvskill.verifier.options import Limits

__all__ = ["Child", "Outcome", "run_children"]

_PACKAGE = Path(__file__).resolve().parents[1]
_BOOTSTRAP = Path(__file__).resolve().parent / "child" / "bootstrap.py"
_LOG_TAIL = 3000


@dataclass
class Outcome:
    """How a child ended. `died` says why there is no result: "timeout", "killed by signal N", "exit N"."""

    role: str
    result: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    died: str | None = None
    log: str = ""
    seconds: float = 0.0

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that ended the job, described by the child."""
        found = self.result.get("error")
        return found if isinstance(found, dict) else None

    @property
    def ok(self) -> bool:
        """The job came to its end."""
        return self.died is None and self.error is None


@dataclass
class Child:
    """A job to run: its name, its job values, and the interpreter."""

    name: str
    job: dict[str, Any]
    python: str = sys.executable


class _Running:
    def __init__(self, child: Child, limits: Limits) -> None:
        self.child, self.limits = child, limits
        self.out = Path(child.job["out"])
        self.out.mkdir(parents=True, exist_ok=True)
        job_file = self.out / "job.json"
        job_file.write_text(json.dumps({**child.job, "memory_mb": limits.memory_mb}), encoding="utf-8")
        self.log = (self.out / "log.txt").open("wb")
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            [child.python, str(_BOOTSTRAP), str(_PACKAGE), str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=self.out,
            env=_environment(),
            start_new_session=True,
        )
        self.died: str | None = None

    def finished(self) -> bool:
        """True when the process has ended, or was ended because it took too long."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.start > self.limits.seconds:
            self.died = f"no result after {self.limits.seconds:.0f} s"
            self.stop()
            return True
        return False

    def stop(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self) -> Outcome:
        """Read the result files."""
        self.log.close()
        out = Outcome(self.child.name, seconds=time.monotonic() - self.start)
        out.log = _tail(self.out / "log.txt")
        path = self.out / "result.json"
        if path.is_file():
            out.result = json.loads(path.read_text(encoding="utf-8"))
        elif self.died:
            out.died = self.died
        elif self.process.returncode < 0:
            out.died = f"killed by signal {signal.Signals(-self.process.returncode).name}"
        else:
            out.died = f"ended with status {self.process.returncode} and no result"
        arrays = self.out / "arrays.npz"
        if arrays.is_file() and out.ok:
            import numpy as np

            with np.load(arrays) as data:
                out.arrays = {key: data[key] for key in data.files}
        return out


def run_children(children: Iterable[Child], limits: Limits) -> dict[str, Outcome]:
    """Run all children at the same time; one Outcome by name."""
    running = [_Running(child, limits) for child in children]
    done: dict[str, Outcome] = {}
    try:
        while len(done) < len(running):
            for item in running:
                if item.child.name not in done and item.finished():
                    done[item.child.name] = item.outcome()
                    _release_waiting(item, done[item.child.name])
            time.sleep(0.02)
    finally:
        for item in running:
            if item.process.poll() is None:
                item.stop()
    return done


def _release_waiting(item: _Running, outcome: Outcome) -> None:
    """Parties that wait for a checkpoint must learn that none will come."""
    ckpt = item.child.job.get("ckpt")
    if item.child.job["role"] == "hf" and ckpt and not (Path(ckpt) / "READY").is_file():
        (Path(ckpt) / "FAILED").write_text(outcome.died or "no checkpoint", encoding="utf-8")


def _environment() -> Mapping[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE"))}
    env.update(
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONUNBUFFERED="1",
        PYTHONNOUSERSITE="1",
    )
    return env


def _tail(path: Path) -> str:
    data = path.read_bytes()[-_LOG_TAIL:] if path.is_file() else b""
    return data.decode("utf-8", errors="replace")
