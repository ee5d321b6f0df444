"""Runs many verifications of one target tree: imports are done once, HF runs once per config and workload.

The runner has the signature of `kvskill.verifier.jobs.run_children`; everything before and after it is the product's
own code.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import kvskill
from kvskill.verifier.jobs import Child, Outcome, run_children
from kvskill.verifier.options import Limits

__all__ = ["Zygote"]

PACKAGE = Path(kvskill.__file__).resolve().parent
MAIN = Path(__file__).with_name("zygote_main.py")


class Zygote:
    """A forking child process for `tree`; at most two jobs of it run at a time, ranks of one run together."""

    def __init__(self, tree: Path, cache: Path, backend: str = "table") -> None:
        env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.log = (cache / "zygote.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(MAIN), str(PACKAGE), str(tree), backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=env,
        )
        self.cache = cache
        self.slots = threading.BoundedSemaphore(2)
        self.done: dict[str, int] = {}
        self.changed = threading.Condition()
        self.ready = threading.Event()
        self.hf_lock = threading.Lock()
        self.hf: dict[str, tuple[Outcome, Path]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if words[0] == "ready":
                self.ready.set()
            elif words[0] == "done":
                with self.changed:
                    self.done[words[1]] = int(words[2])
                    self.changed.notify_all()
        self.ready.set()

    def run(self, children: list[Child], limits: Limits) -> dict[str, Outcome]:
        """As run_children."""
        out: dict[str, Outcome] = {}
        rest = []
        for child in children:
            if child.job["role"] == "hf":
                out[child.name] = self._hf(child, limits)
            else:
                rest.append(child)
        with self.slots:
            for child in rest:
                self._start(child)
            for child in rest:
                out[child.name] = self._finish(child, limits)
        return out

    def _hf(self, child: Child, limits: Limits) -> Outcome:
        key = json.dumps([Path(child.job["config"]).read_text(), child.job["workload"], child.job["seed"]])
        ckpt = Path(child.job["ckpt"])
        with self.hf_lock:
            if key not in self.hf:
                outcome = run_children([child], limits)["hf"]
                kept = self.cache / f"ckpt-{len(self.hf)}"
                shutil.copytree(ckpt, kept)
                self.hf[key] = (outcome, kept)
        outcome, kept = self.hf[key]
        shutil.copytree(kept, ckpt, dirs_exist_ok=True)
        return outcome

    def _start(self, child: Child) -> None:
        assert self.ready.wait(120) and self.process.poll() is None, "the zygote did not start"
        out = Path(child.job["out"])
        out.mkdir(parents=True, exist_ok=True)
        path = out / "job.json"
        path.write_text(json.dumps(child.job), encoding="utf-8")
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()

    def _finish(self, child: Child, limits: Limits) -> Outcome:
        out = Path(child.job["out"])
        path = str(out / "job.json")
        with self.changed:
            ended = self.changed.wait_for(lambda: path in self.done, limits.seconds)
        outcome = Outcome(child.name, log=(out / "log.txt").read_text(errors="replace")[-3000:])
        if not ended:
            outcome.died = "no result in time"
        elif (out / "result.json").is_file():
            outcome.result = json.loads((out / "result.json").read_text())
        else:
            outcome.died = f"ended with status {self.done[path]}"
        if outcome.ok and (out / "arrays.npz").is_file():
            with np.load(out / "arrays.npz") as data:
                outcome.arrays = {k: data[k] for k in data.files}
        return outcome

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.log.close()


def findings(report: Any) -> set[str]:
    """Codes of a report: findings of severity error, and the causes that they name."""
    out = {f.code for f in report.findings if f.severity.value == "error"}
    return out | {str(f.data["cause"]) for f in report.findings if f.data.get("cause")}
