"""Runs of the Paged model: the recorded one, and more that must agree with it.

1. recorded: permuted block ids, NaN in the null block and in every block that nobody owns;
2. again: nothing is reset, so blocks are reused in another order with stale data in them;
3. staggered: large finite poison, requests in reverse order, ends at different steps (rows move up, idle rows);
4. split: prompts that end later, so that prefill computes what decode computed (with drafts: those as well).

The repetitions end earlier than the recorded run: long enough to fill a block and to start the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvskill.verifier.backend import current, using
from kvskill.verifier.child.caches import Caches
from kvskill.verifier.child.framework import serves_idle_rows
from kvskill.verifier.child.links import check, release_link
from kvskill.verifier.child.target import FINITE_POISON, NOTED_RULES, Tap
from kvskill.verifier.kernels.rules.warnings import take_warnings

__all__ = ["run_paged"]

EXACT = 1e-5  # the same sums in another order, relative to the largest logit
SPLIT_BF16 = 4e-2  # two formulations of attention, rounded to bfloat16


def run_paged(target: Any, caches: Caches, cache_info: Any, job: dict[str, Any], result: dict[str, Any]) -> Any:
    """All runs; returns the arrays of the recorded run (and of the others, by prefix, when they differ)."""
    from kvskill.verifier.child.observe import Observer
    from kvskill.verifier.child.recorder import Recorder

    if getattr(target.engine, "kvcache_manager", None) is None:
        return {}
    caches.attach(target.engine.kvcache_manager)
    groups = {c.layer: c.group for c in caches.tensors}
    windows = {c.layer: c.window for c in caches.tensors}
    observer = Observer(caches, groups, windows)
    recorder = Recorder(target, job, Tap(target.model), observer, caches)
    waves = [list(w) for w in job["waves"]]
    idle = serves_idle_rows(target.engine)
    if not idle:
        waves = [w + [w[-1]] * (int(job["batch_size"]) - len(w)) for w in waves]
        result["notes"].append("this tree fills its batch with copies of the last prompt: no idle rows were run")
    seed = int(job["seed"])

    result["phase"] = "run"
    caches.permute(seed)
    caches.start(float("nan"))
    recorder.begin(keep_hidden=True)
    _waves(target, recorder, waves, job, result, "release.blocks")
    arrays = recorder.arrays()
    first, recorder.first_draft = recorder.logits, recorder.draft
    result["observations"] = observer.to_json()
    result["rule_warnings"] = [
        {
            "noted": h.rule in NOTED_RULES,
            "rule": h.rule,
            "code": h.code,
            "source": h.source,
            "message": f"{h.op}: {h.message}",
            "count": n,
        }
        for h, n in take_warnings().items()
    ]
    result["problems"] = recorder.problems
    result["first_decode"] = {str(r): n for r, n in recorder.first_decode.items()}
    result["permuted"] = caches.permuted
    result["groups"] = {str(layer): group for layer, group in groups.items()}
    if job["metamorphic"]:
        # the rules were checked on every call of the recorded run
        with using(replace(current(), enforce=False)):
            arrays.update(_metamorphic(target, caches, recorder, waves, idle, first, job, result))
    return arrays


def _metamorphic(
    target: Any,
    caches: Caches,
    recorder: Any,
    waves: list[list[int]],
    idle: bool,
    first: Any,
    job: dict[str, Any],
    result: dict[str, Any],
) -> dict[str, Any]:
    """The repetitions; arrays of those that differ from the recorded run."""
    arrays: dict[str, Any] = {}
    result["phase"] = "run again"
    caches.start(None)
    recorder.begin(keep_hidden=False)
    steps = int(job["steps"])
    requests = range(len(job["prompts"]))
    ends = dict.fromkeys(requests, min(steps, int(job["block_size"]) + 2))
    _waves(target, recorder, waves, job, result, "release.no-leak", ends)
    arrays.update(_judge(result, "run.again", first, recorder, "same run, blocks reused in another order", "again/"))

    result["phase"] = "run staggered"
    caches.permute(int(job["seed"]) + 1)
    caches.start(FINITE_POISON)
    recorder.begin(keep_hidden=False)
    ends = {r: min(steps, 12) - (3 * (r % 4) if idle else 0) for r in requests}
    ends = {r: max(1, n) for r, n in ends.items()}
    _waves(target, recorder, [w[::-1] for w in waves[::-1]], job, result, "release.staggered", ends)
    text = "reverse order, finite poison" + (", ends at different steps" if idle else "")
    arrays.update(_judge(result, "run.staggered", first, recorder, text, "staggered/"))

    result["phase"] = "run split"
    later = int(job["later"])
    caches.start(float("nan"))
    draft = recorder.first_draft
    recorder.begin(keep_hidden=False)
    recorder.prompts = [n + later for n in job["prompts"]]
    target.tokenizer.prompts.update(
        {f"#{r}": list(t[: job["prompts"][r] + later]) for r, t in enumerate(job["tokens"])}
    )
    _waves(target, recorder, waves, job, result, "release.split", dict.fromkeys(requests, 2))
    text = f"prompts that end {later} tokens later"
    bound = EXACT if job["dtype"] == "fp32" else SPLIT_BF16
    arrays.update(_judge(result, "run.split", first, recorder, text, "split/", None, bound))
    if draft and int(job["next_n"]) == 1:  # with more, the draft's cache holds states of its own guesses
        _judge(result, "run.draft-split", draft, recorder, f"draft model, {text}", "", recorder.draft, bound)
    return arrays


def _waves(
    target: Any,
    recorder: Any,
    waves: list[list[int]],
    job: dict[str, Any],
    result: dict[str, Any],
    link: str,
    stagger: dict[int, int] | None = None,
) -> None:
    """Run the waves one after the other; the scheduler is reset between them, as generate() does."""
    scheduler, engine = target.scheduler, target.engine
    restore = _stagger(scheduler, recorder, stagger) if stagger else None
    done = 0
    for wave in waves:
        scheduler.reset()
        recorder.requests = {}
        recorder.steps.clear()
        for request in wave:
            recorder.requests[scheduler.add_request(f"#{request}")] = request
        limit = 4 * (int(job["steps"]) + len(wave)) + 16
        while scheduler.has_work():
            if stagger:
                _end_early(scheduler, recorder, stagger)
            if not scheduler.run_step(engine):
                raise RuntimeError("the scheduler has work but scheduled no batch")
            limit -= 1
            if limit < 0:
                raise RuntimeError("the scheduler does not come to an end")
        done += len(wave)
    if restore is not None:
        restore()
    release_link(recorder.caches, done, result, link)


def _stagger(scheduler: Any, recorder: Any, stagger: dict[int, int]) -> Any:
    """End each request after its own number of decode steps."""
    original = getattr(scheduler, "_should_finish", None)
    if original is None:
        return None
    steps = recorder.steps

    def should_finish(request: Any) -> bool:
        steps[request.request_id] = steps.get(request.request_id, 0) + 1
        limit = stagger[recorder.requests[request.request_id]]
        return bool(original(request)) or steps[request.request_id] >= limit

    scheduler._should_finish = should_finish

    def restore() -> None:
        scheduler._should_finish = original

    return restore


def _end_early(scheduler: Any, recorder: Any, stagger: dict[int, int]) -> None:
    """For schedulers that only count steps: let the next step be the last one where it is a request's turn."""
    if hasattr(scheduler, "_should_finish"):
        return
    for framework_id, request in scheduler.running_requests.items():
        if request.decode_step_count + 1 >= stagger[recorder.requests[framework_id]]:
            request.decode_step_count = scheduler.config.max_new_tokens - 1


def _judge(
    result: dict[str, Any],
    name: str,
    first: Any,
    recorder: Any,
    text: str,
    prefix: str,
    book: Any = None,
    bound: float = EXACT,
) -> dict[str, Any]:
    """Compare a run (`book`: its logits by request and position) with the recorded one, where both have a position."""
    worst, nan, count, above = 0.0, 0, 0, 0
    where: tuple[int, int] | None = None
    first_nan: tuple[int, int] | None = None
    for request, found in (book or recorder.logits).items():
        reference = first.get(request, {})
        scale = max((float(np.nanmax(np.abs(v))) for v in reference.values() if np.isfinite(v).any()), default=1.0)
        for position, values in found.items():
            if position not in reference:
                continue
            count += 1
            other = reference[position]
            if np.isnan(values).any() or np.isnan(other).any():
                if not (np.isnan(values) == np.isnan(other)).all():
                    nan += 1
                    first_nan = first_nan or (request, position)
                continue
            difference = float(np.abs(values - other).max()) / (scale or 1.0)
            above += difference > bound
            if difference > worst:
                worst, where = difference, (request, position)
    allowed = count // 10 if bound > EXACT else 0  # bfloat16: a router may flip
    ok = nan == 0 and above <= allowed and count > 0
    figures = f"{text}: {count} positions, max difference {worst:.1e}"
    if nan:
        figures += f", {nan} positions with NaN in only one of the runs"
    where = first_nan or where
    if not ok and where is not None:
        figures += f" (request {where[0]}, position {where[1]})"
    check(result, name, ok, figures)
    return {} if ok else recorder.arrays(prefix)
