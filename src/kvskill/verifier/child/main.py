"""Runs one job and writes how it went: `result.json` always, `arrays.npz` when there are figures.

Every exception is caught here and classified by where it was raised, so that a crash of the target's code is a
finding with a place, and a fault of the environment or of kvskill is not blamed on the target.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

__all__ = ["run_job"]


def run_job(job: dict[str, Any]) -> int:
    """Exit status 0: result.json is complete (its `error` may be set)."""
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    _limit(job)
    result: dict[str, Any] = {"role": job["role"], "phase": "start", "checks": [], "notes": [], "error": None}
    try:
        if job["role"] == "hf":
            from kvskill.verifier.child.hf import run_hf

            run_hf(job, result)
        elif job["role"] == "hf-greedy":
            from kvskill.verifier.standalone.hf_child import run_hf_greedy

            run_hf_greedy(job, result)
        elif job["role"] == "runner":
            from kvskill.verifier.standalone.runner_child import run_runner

            run_runner(job, result)
        elif job["role"] == "templates":
            from kvskill.verifier.child.templates import run_templates

            run_templates(job, result)
        else:
            from kvskill.verifier.child.target import run_target

            run_target(job, result)
        result["phase"] = "done"
    except BaseException as error:  # a target may raise anything, SystemExit included
        if isinstance(error, KeyboardInterrupt):
            raise
        result["error"] = describe(error, job)
    temporary = out / "result.json.part"
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(out / "result.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no teardown: process groups and stub libraries may hang there


def _limit(job: dict[str, Any]) -> None:
    """Memory and core-dump limits, and an own process group so that the parent can end it with its children."""
    memory = int(job.get("memory_mb", 0)) << 20
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def describe(error: BaseException, job: dict[str, Any]) -> dict[str, Any]:
    """Type, message, and the innermost frame inside the target tree and inside the model folder, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    chain: BaseException | None = error
    while chain is not None and not frames:
        frames = traceback.extract_tb(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    roots = [str(Path(r).resolve()) for r in job.get("trees", []) if r]
    target = model = None
    for frame in frames:
        path = os.path.realpath(frame.filename)
        for root in roots:
            if path.startswith(root + os.sep):
                place = {
                    "file": os.path.relpath(path, root),
                    "line": frame.lineno or 1,
                    "code": frame.line or "",
                }
                target = place
                if os.sep + "models" + os.sep in path or path.startswith(str(job.get("folder", "\0"))):
                    model = place
    out: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "target": target,
        "model": model,
        "trace": "".join(traceback.format_exception(type(error), error, error.__traceback__))[-6000:],
    }
    for name in ("rule", "code", "source", "op", "what"):
        value = getattr(error, name, None)
        if isinstance(value, str):
            out[name] = value
    return out
