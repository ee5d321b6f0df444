"""From what the children left to a report: figures, checks, findings, and a word on each party."""

from __future__ import annotations

from typing import Any

from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.verifier.compare import OUTLIERS, compare, largest, table_tolerance
from kvskill.verifier.diagnose import child_finding, difference_findings, observation_findings, problem_findings
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.jobs import Outcome
from kvskill.verifier.modelconfig import layer_count
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.plan import Plan
from kvskill.verifier.report import Check, VerifyReport
from kvskill.verifier.workload import Workload

__all__ = ["judge"]


def judge(plan: Plan, outcomes: dict[str, Outcome]) -> VerifyReport:
    """The report of a finished verification. `outcomes` has "paged" and, where they ran, "hf" and "legacy"."""
    model, options, work = plan.model, plan.options, plan.work
    paged, hf, legacy = outcomes["paged"], outcomes.get("hf"), outcomes.get("legacy")
    report = VerifyReport(model.shown, model.root.name, work.seed)
    report.setup = _setup(plan, paged)
    report.notes = [*plan.small.notes, *work.notes]
    report.backend = paged.result.get("backend", {})
    _backend_notes(report, paged, options)
    references: dict[str, dict[str, Any]] = {}
    report.parties["Paged"] = _party(paged)
    report.parties["HF"] = _hf_party(plan, hf)
    report.parties["Legacy"] = _legacy_party(plan, legacy)
    failed = {n: o for n, o in outcomes.items() if n.startswith("paged") and not o.ok}
    if failed:  # one rank is enough: its share of every layer is missing
        shown = {n: "Paged" if n == "paged" else f"Paged rank {n[5:]}" for n in failed}
        report.findings += [child_finding(o, model, shown[n]) for n, o in failed.items()]
        report.checks = _checks(paged)
        report.findings += problem_findings(report.checks, model)
        return report
    report.checks = _checks(paged)
    if not paged.arrays:
        report.findings += problem_findings(report.checks, model)
        return report
    report.checks += _run_checks(paged, work, options.mtp)
    report.checks += _rank_checks(plan, outcomes)
    dtype = str(paged.result.get("dtype", options.dtype))
    tolerance = table_tolerance(dtype, options.tolerance)
    if hf is not None and hf.ok and hf.arrays:
        references["HF"] = hf.arrays
    if legacy is not None and legacy.ok:
        references["Legacy"] = legacy.arrays
    for name, reference in references.items():
        report.comparisons += compare(
            name, reference, paged.arrays, list(work.prompts), tolerance, outliers=OUTLIERS[dtype]
        )
    if options.mtp:
        report.checks += _greedy_checks(references, paged.arrays, tolerance)
    if options.mtp and legacy is not None and "Legacy" in references:
        report.checks.append(_draft_check(legacy, paged.arrays, work, tolerance))
    observations = dict(paged.result.get("observations", {}))
    observations["groups"] = paged.result.get("groups", {})
    attention = hf.result.get("attention", {}) if hf is not None else {}
    report.findings += difference_findings(report.comparisons, references, paged.arrays, observations, attention, model)
    report.findings += observation_findings(observations, model)
    report.findings += _warnings(paged, model)
    report.findings += _corrected_ranks(outcomes)
    report.findings += problem_findings(report.checks, model, explained=bool(observations.get("findings")))
    _weigh_oracles(report, references, work, tolerance, model)
    if not references:
        fact = "There is no oracle: " + "; ".join(f"{k}: {v}" for k, v in report.parties.items() if k != "Paged") + "."
        todo = "Give --before-repo or a transformers release that knows the architecture."
        report.findings.append(Diagnostic("KV433", Severity.WARNING, fact, todo, Span(model.shown)))
    return report


def _warnings(paged: Outcome, model: ModelUnderTest) -> list[Diagnostic]:
    """Operator rules of level warning that calls of the recorded run broke."""
    return [
        Diagnostic(
            w["code"],
            Severity.ERROR if w["noted"] else Severity.WARNING,
            f"{w['message']}, in {w['count']} calls.",
            f"Rule {w['rule']}: {w['source']}.",
            Span(model.shown),
            w,
        )
        for w in paged.result.get("rule_warnings", [])
    ]


def _setup(plan: Plan, paged: Outcome) -> list[str]:
    work = plan.work
    versions = ", ".join(f"{k} {v}" for k, v in paged.result.get("versions", {}).items())
    backend = paged.result.get("backend", {})
    lines = [
        f"config: {plan.base.source}; {_depth(plan)}" + (f", window {plan.small.window}" if plan.small.window else ""),
        f"prompts {','.join(map(str, work.prompts))} in {len(work.waves)} waves of at most {work.batch_size}, "
        f"{work.steps} decode steps, block size {work.block_size}, {plan.options.dtype}, tp {plan.options.tp}",
    ]
    if plan.options.waive:
        lines.append(f"operator rules not checked: {', '.join(plan.options.waive)}")
    if backend:
        lines.append(
            f"operators: {backend.get('kind')}, torch_npu {backend.get('torch_npu')}, profile "
            f"{backend.get('profile')}; {versions}"
        )
    return lines


def _depth(plan: Plan) -> str:
    """How many layers run, of how many: the small model keeps each kind of layer, not each layer."""
    kept, whole = plan.small.layers, layer_count(plan.base.values)
    return f"{kept} layers" if whole in (None, kept) else f"{kept} of {whole} layers (every kind)"


def _backend_notes(report: VerifyReport, paged: Outcome, options: VerifyOptions) -> None:
    report.notes += [str(n) for n in paged.result.get("backend", {}).get("notes", ())]
    report.notes += paged.result.get("notes", [])
    if paged.result.get("idle_draft_rules"):
        names = ", ".join(paged.result["idle_draft_rules"])
        report.notes.append(f"not checked, as idle rows with drafts break it by design: {names}")
    if paged.result.get("named_weights"):
        report.notes.append("no HF checkpoint: weights were set by parameter name, load_weights was not exercised")
    if options.tp > 1 and options.checks:
        report.notes.append("repeated, staggered and split runs are made at tp 1 only")
    served = paged.result.get("groups_served")
    if served:
        report.notes.append(f"one-process group served at world size 1: {', '.join(served)}")
    if paged.result.get("permuted") is False:
        report.notes.append("block ids were not permuted: the target's pool has another form")


def _party(outcome: Outcome) -> str:
    if outcome.ok:
        return f"ran, {outcome.seconds:.1f} s"
    phase = outcome.result.get("phase", "start")
    return f"failed in phase {phase}: {outcome.died or (outcome.error or {}).get('type')}"


def _hf_party(plan: Plan, hf: Outcome | None) -> str:
    if hf is None:
        if plan.options.against == "legacy":
            return "not run: --against legacy"
        return "not run: the config has no model_type"
    if "unsupported" in hf.result:
        return f"not run: {hf.result['unsupported']}"
    if not hf.ok:
        message = (hf.error or {}).get("message", hf.died)
        return f"failed in phase {hf.result.get('phase')}: {message}"
    return f"transformers {hf.result['versions']['transformers']}, {hf.seconds:.1f} s"


def _legacy_party(plan: Plan, legacy: Outcome | None) -> str:
    if legacy is None:
        return "not run: --against hf" if plan.options.against == "hf" else f"not run: {plan.legacy.reason}"
    if legacy.ok:
        one = ", a one-token prompt padded to two (compared from there)" if min(plan.work.prompts) < 2 else ""
        return f"{plan.legacy.reason}, one prompt at a time{one}, {legacy.seconds:.1f} s"
    error = legacy.error or {}
    place = error.get("model") or error.get("target")
    where = f" at {place['file']}:{place['line']}" if place else ""
    message = " ".join(str(error.get("message", legacy.died)).split())[:200]
    return f"not run: it fails in phase {legacy.result.get('phase')}{where} ({error.get('type', '')} {message})"


def _checks(paged: Outcome) -> list[Check]:
    out = [Check(c["name"], c["ok"], c["text"]) for c in paged.result.get("checks", [])]
    if paged.result.get("paged") is False:
        out.insert(
            0,
            Check("init.cache-info", False, "the model has no get_cache_info, the engine runs it as Legacy"),
        )
    unloaded = paged.result.get("unloaded", {}).get("main", [])
    if unloaded:
        text = f"{len(unloaded)} parameters were not in the checkpoint: {', '.join(unloaded[:3])}"
        out.append(Check("init.weights", False, text))
    return out


def _run_checks(paged: Outcome, work: Workload, next_n: int) -> list[Check]:
    result = paged.result
    found = {f["kind"] for f in result.get("observations", {}).get("findings", [])}
    forms = result.get("observations", {}).get("forms", {})
    paged_calls = [f for k, f in forms.items() if k.endswith("decode") and f["paged"]]
    out = []
    if paged_calls:
        text = f"{len(paged_calls)} layers read through the table of their own group"
        out.append(Check("run.block-table-key", "wrong-table" not in found, text))
    elif result.get("paged"):
        out.append(Check("run.block-table-key", None, "no decode call with a block table was seen"))
    first = {int(k): v for k, v in result.get("first_decode", {}).items()}
    new = 1 + next_n
    wrong = [r for r, n in first.items() if n != work.prompts[r] + new]
    text = f"first decode has key length prompt + {new}: " + ", ".join(str(first[r]) for r in sorted(first))
    out.append(Check("run.kv-length", not wrong and "kv-length" not in found, text))
    shapes = [p["text"] for p in result.get("problems", []) if p["kind"] == "logits-shape"]
    out.append(Check("run.logits-shape", not shapes, "; ".join(shapes) or "[n, 1, V] and [B, q, V]"))
    return out


def _corrected_ranks(outcomes: dict[str, Outcome]) -> list[Diagnostic]:
    """A tree whose manager gives every rank the number 0 (fixed upstream on 2026-04-29) would load wrong shards."""
    names = sorted({n for o in outcomes.values() for n in o.result.get("ranks_corrected", [])})
    if not names:
        return []
    fact = f"The target's CommManager answers rank 0 on every rank for {', '.join(names)}; the run used the true ranks."
    todo = "With this tree every rank would load the first shard: take a newer executor, or its fix of 2026-04-29."
    span = Span("executor/core/config/comm_manager.py")
    return [Diagnostic("KV422", Severity.WARNING, fact, todo, span, {"groups": names})]


def _greedy_checks(references: dict[str, dict[str, Any]], paged: dict[str, Any], tolerance: float) -> list[Check]:
    """With drafts the model must choose the tokens that it chooses without: those of the references, which draft
    nothing or whose choices no draft changes. Ties within the tolerance may fall either way."""
    out = []
    for name, reference in references.items():
        count, other = 0, 0
        for key, logits in reference.items():
            if not key.startswith("logits/") or key not in paged:
                continue
            request = key.removeprefix("logits/")
            rows = {int(p): i for i, p in enumerate(reference[f"positions/{request}"])}
            for i, position in enumerate(paged[f"positions/{request}"]):
                row = rows.get(int(position))
                if row is None:
                    continue
                theirs, chosen = logits[row], int(paged[key][i].argmax())
                count += 1
                other += bool(theirs.max() - theirs[chosen] > tolerance * largest(theirs))
        text = f"{count - other} of {count} greedy tokens with drafts are those of {name}"
        out.append(Check("run.greedy", bool(count) and not other, text))
    return out


def _draft_check(legacy: Outcome, paged: dict[str, Any], work: Workload, tolerance: float) -> Check:
    """The draft model's logits, against the Legacy draft model's.

    The engine of the padded era puts the first new token after the padding, not after the prompt
    (executor/core/model_worker/mtp_worker.py until 2026-04-25): only the drafts of its longest prompt are right.
    """
    found = compare("draft", legacy.arrays, paged, list(work.prompts), tolerance, "draft")
    only = ""
    if legacy.result.get("padded"):
        found = [c for c in found if c.prompt == max(work.prompts)]
        only = "; only the longest prompt is compared: the padded engine drafts wrongly for shorter ones"
    worst = max((c.relative if not c.nan else float("inf") for c in found), default=0.0)
    count = sum(c.positions for c in found)
    text = f"{count} draft positions differ from Legacy by at most {worst:.1e}{only}"
    return Check("run.draft", bool(count) and worst <= tolerance, text)


def _rank_checks(plan: Plan, outcomes: dict[str, Outcome]) -> list[Check]:
    """Do the ranks know their places, and do they compute the same logits?"""
    tp = plan.options.tp
    if tp == 1:
        return []
    ranks = [outcomes["paged" if r == 0 else f"paged{r}"] for r in range(tp)]
    answers = {name: [r.result.get("ranks", {}).get(name) for r in ranks] for name in ranks[0].result.get("ranks", {})}
    same = sorted(name for name, found in answers.items() if len(set(found)) < tp)
    text = f"{len(answers)} groups give each of {tp} ranks its own place"
    if same:
        text = f"get_rank answers {answers[same[0]]} on ranks 0 to {tp - 1} for {', '.join(same)}"
    out = [Check("run.rank-places", not same, text)]
    found = [
        c for other in ranks[1:] for c in compare("rank", ranks[0].arrays, other.arrays, list(plan.work.prompts), 1e-5)
    ]
    worst = max((c.relative if not c.nan else float("inf") for c in found), default=0.0)
    positions = sum(c.positions for c in found)
    text = f"{positions} logits of {tp} ranks differ by at most {worst:.1e}"
    out.append(Check("run.ranks-agree", positions > 0 and worst <= 1e-5, text))
    return out


def _weigh_oracles(
    report: VerifyReport, references: dict[str, Any], work: Workload, tolerance: float, model: ModelUnderTest
) -> None:
    """Two oracles that disagree: say so, and with which one Paged agrees."""
    if not {"HF", "Legacy"} <= set(references):
        return
    between = compare("HF/Legacy", references["HF"], references["Legacy"], list(work.prompts), tolerance)
    bad = [c for c in between if c.positions and (c.nan or c.relative > tolerance)]
    if not bad:
        return
    hf_ok = all(c.ok for c in report.comparisons if c.oracle == "HF")
    first = bad[0]
    fact = (
        f"The oracles disagree: Legacy differs from HF by {first.relative:.2e} in request {first.request} from "
        f"position {first.first_bad}; Paged agrees with {'HF' if hf_ok else 'neither or Legacy'}."
    )
    if hf_ok:
        report.findings = [
            f for f in report.findings if not (f.code in ("KV400", "KV401") and f.data.get("oracle") == "Legacy")
        ]
        todo = "HF is the definition; the old code was wrong there."
        report.findings.append(Diagnostic("KV421", Severity.WARNING, fact, todo, Span(model.shown)))
    else:
        todo = "Find out first which oracle is the model's definition."
        report.findings.append(Diagnostic("KV421", Severity.ERROR, fact, todo, Span(model.shown)))
