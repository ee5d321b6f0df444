"""From what the children of a standalone verification left to figures, checks and findings."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.verifier.compare import Comparison, distance, largest, table_tolerance
from kvskill.verifier.diagnose import child_finding, problem_findings
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.jobs import Outcome
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.report import Check, VerifyReport
from kvskill.verifier.standalone.settings import Sizes

__all__ = ["Run", "judge"]

SAME = 1e-5  # two runs of one program on other batches: rounding of float32 only


@dataclass(frozen=True)
class Run:
    """What was asked for and how it ended. Outcomes: "new" ("new1", ... for further ranks), "hf", and "old"."""

    options: VerifyOptions
    model: ModelUnderTest
    outcomes: dict[str, Outcome]
    lengths: list[int]
    sizes: Sizes
    before: str
    named: bool

    @property
    def ranks(self) -> list[Outcome]:
        """The new runner, rank by rank."""
        return [self.outcomes["new" if r == 0 else f"new{r}"] for r in range(self.sizes.tp)]


def judge(report: VerifyReport, run: Run) -> None:
    """Fill the report."""
    new, old, hf = run.outcomes["new"], run.outcomes.get("old"), run.outcomes["hf"]
    report.setup = [
        f"prompts {','.join(map(str, run.lengths))} in one batch, {run.options.decode_steps} new tokens each, block "
        f"size {run.options.block_size}, cache length {run.sizes.length}, float32, tp {run.sizes.tp}"
    ]
    if run.options.waive:
        report.setup.append(f"operator rules not checked: {', '.join(run.options.waive)}")
    report.backend = new.result.get("backend", {})
    report.parties["new runner"] = _party(new, "")
    report.parties["old runner"] = _party(old, run.before if run.options.against != "hf" else "--against hf")
    report.parties["HF"] = "not run: --against legacy" if run.options.against == "legacy" else _party(hf, "")
    failed = [(rank, o) for rank, o in enumerate(run.ranks) if not o.ok]
    if failed:
        for rank, outcome in failed:
            party = "new runner's" if not rank else f"new runner's (rank {rank})"
            report.findings.append(_with_interpreter(child_finding(outcome, run.model, party), outcome))
        return
    report.notes += [f"padding {side}: {how}" for side, how in new.result["runs"].items()]
    if run.named:
        report.notes.append("no HF checkpoint: weights were set by parameter name, loading was not exercised")
    report.notes += _times(new, old)
    served = new.result.get("groups_served")
    if served:
        report.notes.append(f"one-process group served at world size 1: {', '.join(sorted(served))}")
    references: dict[str, dict[str, Any]] = {}
    if old is not None and old.ok:
        references["old"] = {k.removeprefix("right/"): v for k, v in old.arrays.items()}
        report.notes += [f"old runner, request {r}: {why}" for r, why in old.result.get("failed", {}).items()]
    if hf.ok and hf.arrays and run.options.against != "legacy":
        references["HF"] = hf.arrays
    bound = table_tolerance("fp32", run.options.tolerance)
    for oracle, reference in references.items():
        for side in ("right", "left"):
            for request, prompt in enumerate(run.lengths):
                if f"{side}/logits/{request}" in new.arrays and f"logits/{request}" in reference:
                    report.comparisons.append(
                        _compare(f"{oracle}, {side}", reference, new.arrays, side, request, prompt, bound)
                    )
    _differences(report, references, run, bound)
    report.checks = _checks(run)
    report.findings += problem_findings(report.checks, run.model)
    for w in new.result.get("rule_warnings", []):
        fact, todo = f"{w['message']}, in {w['count']} calls.", f"Rule {w['rule']}: {w['source']}."
        report.findings.append(Diagnostic(w["code"], Severity.WARNING, fact, todo, Span(run.model.shown), w))
    if not references:
        fact = "There is no oracle: " + "; ".join(f"{k}: {report.parties[k]}" for k in ("old runner", "HF")) + "."
        todo = "Give --before-repo, or a config with a model_type that transformers knows."
        report.findings.append(Diagnostic("KV433", Severity.WARNING, fact, todo, Span(run.model.shown)))


def _with_interpreter(finding: Diagnostic, outcome: Outcome) -> Diagnostic:
    """While modules and configs are loaded, another major release of transformers is the usual cause."""
    release = str(outcome.result.get("versions", {}).get("transformers", ""))
    missing = (outcome.error or {}).get("type") == "ModuleNotFoundError"
    if outcome.result.get("phase") in ("import", "load") and finding.code == "KV407" and release and not missing:
        todo = f"Give the interpreter of the target's own transformers with --python (this one has {release})."
        return replace(finding, todo=todo)
    return finding


def _compare(
    oracle: str, reference: dict[str, Any], tested: dict[str, Any], side: str, request: int, prompt: int, bound: float
) -> Comparison:
    """Logits of every step and the greedy tokens: a token that differs counts as a difference at its position."""
    ref, got = reference[f"logits/{request}"], tested[f"{side}/logits/{request}"]
    ref_tokens, got_tokens = reference[f"tokens/{request}"], tested[f"{side}/tokens/{request}"]
    steps = min(len(ref), len(got))
    scale = largest(ref[:steps]) if steps else 1.0
    first, nan = None, 0
    finite: dict[int, float] = {}
    for step in range(steps):
        bad = bool(np.isnan(got[step]).any() or np.isnan(ref[step]).any())
        nan += bad
        difference = float("inf") if bad else distance(ref[step], got[step]) / (scale or 1.0)
        if not bad:
            finite[step] = difference
        if first is None and (difference > bound or ref_tokens[step] != got_tokens[step]):
            first = prompt - 1 + step
    above = int(first is not None)
    return Comparison(
        oracle,
        request,
        prompt,
        steps,
        max(finite.values(), default=0.0),
        nan,
        bound,
        first,
        abs(len(ref) - len(got)),
        above,
        prefill=finite.get(0),
        decode=max((d for step, d in finite.items() if step), default=None),
    )


def _differences(report: VerifyReport, references: dict[str, dict[str, Any]], run: Run, bound: float) -> None:
    """A finding for each comparison that fails; where the old runner differs from HF and the new one does not, the
    old one was wrong, and that is said instead."""
    for c in report.comparisons:
        if c.ok:
            continue
        if c.oracle.startswith("old") and _old_is_wrong(report, references, c, bound):
            continue
        fact = (
            f"Request {c.request} (prompt {c.prompt}) differs from {c.oracle} padding by {c.relative:.2e} (bound "
            f"{c.tolerance:.0e}) from position {c.first_bad}."
        )
        todo = "Check slots, lengths and the mask of the step."
        if c.oracle.startswith("old") and "HF" not in references and c.prompt == 1:
            todo = (
                "Give a config that transformers knows: contiguous runners often take a one-token prompt for a decode "
                "step, and then the old runner is the wrong one."
            )
        code = "KV401" if c.nan else "KV400"
        report.findings.append(Diagnostic(code, Severity.ERROR, fact, todo, Span(run.model.shown)))
    wrong = sorted({c.request for c in report.comparisons if not c.ok and _old_is_wrong(report, references, c, bound)})
    for request in wrong:
        fact = (
            f"The old runner differs from HF for request {request} (prompt {run.lengths[request]}) run by itself; the "
            "new one agrees with HF."
        )
        todo = "HF is the definition; the old code was wrong there."
        report.findings.append(Diagnostic("KV421", Severity.WARNING, fact, todo, Span(run.model.shown)))


def _old_is_wrong(
    report: VerifyReport, references: dict[str, dict[str, Any]], c: Comparison, bound: float
) -> bool:
    if "HF" not in references or "old" not in references or not c.oracle.startswith("old"):
        return False
    mine = [o for o in report.comparisons if o.request == c.request and o.oracle.startswith("HF")]
    alone = {f"x/{k}": v for k, v in references["old"].items()}
    between = _compare("", references["HF"], alone, "x", c.request, c.prompt, bound)
    return bool(mine) and all(o.ok for o in mine) and not between.ok


def _checks(run: Run) -> list[Check]:
    """The three links in runner form: allocation, metadata of each step, reuse."""
    new = run.outcomes["new"]
    facts = new.result.get("facts", {})
    if "cache_shapes" not in facts:
        return [Check("runner.allocation", False, "no step carried paged metadata")]
    rows = len(run.lengths)
    out = [*_allocation(facts, run, rows), *_metadata(facts, run)]
    worst = max(_apart(new.arrays, "right", "again", r) for r in range(rows))
    out.append(Check("runner.reuse", worst <= SAME, f"a later model_generate differs by at most {worst:.1e}"))
    if run.options.checks:
        out += [_alone(new, rows), _overflow(new, rows)]
    if run.sizes.tp > 1:
        worst = max(_apart(new.arrays, "right", "right", r, o.arrays) for o in run.ranks[1:] for r in range(rows))
        text = f"logits of {run.sizes.tp} ranks differ by at most {worst:.1e}"
        out.append(Check("runner.ranks-agree", worst <= SAME, text))
    stages = new.result.get("times", {})
    wanted_stages = {"prefill", "decode"} if run.options.decode_steps > 1 else {"prefill"}
    text = f"`inference time cost of` lines for {', '.join(sorted(stages)) or 'none'}"
    out.append(Check("runner.log-lines", wanted_stages <= set(stages), text))
    return out


def _allocation(facts: dict[str, Any], run: Run, rows: int) -> list[Check]:
    shapes, size = facts["cache_shapes"], run.sizes.block_size
    rows = facts.get("batch", rows)  # a runner that takes its prompts one by one has a cache for one
    blocks = -(-run.sizes.length // size)
    table = facts.get("table", [rows, blocks])  # one new token: no decode step has shown the whole table
    # a cache for more rows than the test has is as good
    enough = [len(s) == 4 and s[0] >= rows * blocks and s[0] % blocks == 0 and s[1] == size for s in shapes]
    good = all(enough) and table == [rows, blocks]
    good = good and facts["table_dtype"] == "torch.int32"
    text = f"caches {' and '.join(map(str, shapes))}, table {table} {facts['table_dtype']}"
    own = facts["storages"] == len(shapes) * facts["layers"]
    return [
        Check("runner.allocation", good, text),
        Check("runner.own-storage", own, f"{facts['storages']} storages for {facts['layers']} layers"),
    ]


def _metadata(facts: dict[str, Any], run: Run) -> list[Check]:
    """What the watch saw in each step of each rank."""
    problems: dict[str, list[str]] = {}
    for outcome in run.ranks:
        for kind, text in outcome.result.get("problems", []):
            problems.setdefault(kind, []).append(text)

    def check(name: str, kind: str, fine: str) -> Check:
        found = list(dict.fromkeys(problems.get(kind, [])))
        return Check(name, not found, "; ".join(found[:3]) or fine)

    out = [
        check("runner.slots", "slots", f"{facts['steps']} steps: slots follow the block table"),
        check("runner.key-lengths", "lengths", "each step shows the tokens in the cache, the new one included"),
        check("runner.fed-tokens", "tokens", "each step gets the best token of the step before"),
    ]
    if run.options.decode_steps > 1:
        first = facts.get("first_decode")
        text = f"first decode has key lengths {first}"
        out.append(Check("runner.kv-length", first == [n + 1 for n in run.lengths], text))
    return out


def _apart(arrays: dict[str, Any], one: str, other: str, request: int, others: dict[str, Any] | None = None) -> float:
    """max |a - b| / max |a| of two runs of one request; infinite where one has other steps or NaN."""
    a, b = arrays.get(f"{one}/logits/{request}"), (others or arrays).get(f"{other}/logits/{request}")
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if np.isnan(a).any() or np.isnan(b).any():
        return float("inf")
    return distance(a, b) / (largest(a) or 1.0)


def _alone(new: Outcome, rows: int) -> Check:
    name, how = "runner.batch-of-one", new.result["runs"].get("alone", "not run")
    if how != "ran":
        return Check(name, False, how)
    worst = max(_apart(new.arrays, "right", "alone", r) for r in range(rows))
    return Check(name, worst <= SAME, f"prompts by themselves differ by at most {worst:.1e}")


def _overflow(new: Outcome, rows: int) -> Check:
    """A cache that is one position too short must be an error with a reason, never a silent wrap."""
    name, how = "runner.overflow", new.result["runs"].get("overflow", "not run")
    if how.startswith("raised"):
        return Check(name, "positions, the cache has" in how, f"a cache one position too short {how}")
    if how == "ran" and all(_begins_as(new.arrays, r) for r in range(rows)):
        return Check(name, None, "not tested: a cache that its settings make too short still held all positions")
    return Check(name, False, f"a run with a cache one position too short {how} without an error")


def _begins_as(arrays: dict[str, Any], request: int) -> bool:
    """Did the run with the short cache compute what the recorded run computed for these steps?"""
    a, b = arrays[f"right/logits/{request}"], arrays[f"overflow/logits/{request}"]
    return len(b) <= len(a) and distance(a[: len(b)], b) <= SAME * largest(a)


def _times(new: Outcome, old: Outcome | None) -> list[str]:
    """Median step times as the runners log them; CPU figures with reference kernels say nothing about a device."""
    out = []
    for stage in ("prefill", "decode"):
        parts = []
        for name, outcome in (("old", old), ("new", new)):
            values = (outcome.result.get("times", {}) if outcome is not None else {}).get(stage)
            if values:
                parts.append(f"{name} {statistics.median(values):.1f} ms")
        if parts:
            out.append(f"{stage} step, median, CPU reference kernels: {', '.join(parts)}")
    return out


def _party(outcome: Outcome | None, how: str) -> str:
    if outcome is None:
        return f"not run: {how}"
    if "unsupported" in outcome.result:
        return f"not run: {outcome.result['unsupported']}"
    if outcome.ok:
        return f"{how}, {outcome.seconds:.1f} s" if how else f"ran, {outcome.seconds:.1f} s"
    error = outcome.error or {}
    place = error.get("model") or error.get("target")
    where = f" at {place['file']}:{place['line']}" if place else ""
    message = " ".join(str(error.get("message", outcome.died)).split())[:200]
    return f"failed in phase {outcome.result.get('phase', 'start')}{where} ({error.get('type', '')} {message})"
