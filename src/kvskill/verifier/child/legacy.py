"""Runs the Legacy model, one prompt at a time: Legacy code is often right for batch 1 only.

A prompt of one token is illegal in many Legacy forms (they tell prefill from decode by shape): such a request
runs with its first forced token as part of the prompt, and is judged from there on.
"""

from __future__ import annotations

from typing import Any

from kvskill.verifier.child.caches import Caches
from kvskill.verifier.child.target import Tap

__all__ = ["run_legacy"]


def run_legacy(target: Any, caches: Caches, job: dict[str, Any], result: dict[str, Any]) -> Any:
    """Logits of every request, each in a wave of its own."""
    from kvskill.verifier.child.observe import Observer
    from kvskill.verifier.child.recorder import Recorder

    result["phase"] = "run"
    recorder = Recorder(target, job, Tap(target.model), Observer(caches, {}, {}), caches)
    recorder.begin(keep_hidden=True)
    scheduler = target.scheduler
    for request in range(len(job["prompts"])):
        _clear(target.model)
        if target.mtp_model is not None:
            _clear(target.mtp_model)
        scheduler.reset()
        recorder.requests = {scheduler.add_request(f"#{request}"): request}
        while scheduler.has_work():
            if not scheduler.run_step(target.engine):
                raise RuntimeError("the scheduler has work but scheduled no batch")
    result["problems"] = recorder.problems
    return recorder.arrays()


def _clear(model: Any) -> None:
    """Zero the caches: their memory is uninitialised, and an oracle must not depend on luck."""
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "cache" not in name or "cos" in name or "sin" in name:  # rotary tables are no caches
                continue
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if hasattr(tensor, "is_floating_point") and tensor.is_floating_point() and id(tensor) not in own:
                    tensor.zero_()
