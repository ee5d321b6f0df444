"""One verification from start to report: config, children, figures, findings."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.verifier.before import LegacySource, find_legacy
from kvskill.verifier.compare import compare, table_tolerance
from kvskill.verifier.diagnose import (
    child_finding,
    difference_findings,
    observation_findings,
    problem_findings,
)
from kvskill.verifier.discover import ModelUnderTest, find_model
from kvskill.verifier.jobs import Child, Outcome, run_children
from kvskill.verifier.modelconfig import BaseConfig, SmallConfig, base_config, shrink
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.report import Check, VerifyReport
from kvskill.verifier.workload import Workload, make_workload

__all__ = ["verify_model"]

TP_KEYS = (
    "attn_tp_size",
    "moe_tp_size",
    "embed_tp_size",
    "lmhead_tp_size",
    "dense_tp_size",
    "o_proj_tp_size",
)


@dataclass(frozen=True)
class _Plan:
    options: VerifyOptions
    model: ModelUnderTest
    base: BaseConfig
    small: SmallConfig
    work: Workload
    folder: Path
    legacy: LegacySource
    use_hf: bool
    use_legacy: bool


def verify_model(options: VerifyOptions) -> VerifyReport:
    """Verify one model. Raises InputError when it cannot be run at all (KV430 to KV436)."""
    start = time.monotonic()
    model = find_model(options.model, options.repo)
    if model.config_module is None or model.config_class is None:
        fact = "The model's configuration class was not found."
        raise InputError(
            Diagnostic("KV431", Severity.ERROR, fact, "Name it in the registry.", Span(str(options.model)))
        )
    base = base_config(model, options.config)
    small = shrink(base, model, options.tp, bool(options.mtp))
    work = make_workload(options, small)
    folder = Path(tempfile.mkdtemp(prefix="kvskill-verify-"))
    try:
        legacy = find_legacy(model, options.before_repo, folder)
        plan = _Plan(
            options=options,
            model=model,
            base=base,
            small=small,
            work=work,
            folder=folder,
            legacy=legacy,
            use_hf=options.against in ("hf", "both") and "model_type" in small.values,
            use_legacy=options.against in ("legacy", "both") and legacy.root is not None,
        )
        ckpt = folder / "ckpt"
        ckpt.mkdir()
        (ckpt / "config.json").write_text(json.dumps(small.values, indent=1), encoding="utf-8")
        (ckpt / "generation_config.json").write_text("{}", encoding="utf-8")
        outcomes = run_children(_children(plan, ckpt), options.limits)
        report = _judge(plan, outcomes)
        report.seconds = time.monotonic() - start
        return report
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _children(plan: _Plan, ckpt: Path) -> list[Child]:
    options, work = plan.options, plan.work
    python = options.python or sys.executable
    common = {
        "seed": work.seed,
        "threads": 1,
        "ckpt": str(ckpt),
        "config": str(ckpt / "config.json"),
        "workload": work.to_json(),
        "dtype": options.dtype,
        "trees": [str(plan.model.root)],
        "folder": str(plan.model.folder),
    }
    out = []
    if plan.use_hf:
        out.append(Child("hf", {**common, "role": "hf", "out": str(plan.folder / "hf")}))
    target = {
        **common,
        "name": plan.model.registered or plan.model.name,
        "modeling_module": plan.model.modeling_module,
        "causal_lm": plan.model.causal_lm,
        "config_module": plan.model.config_module,
        "config_class": plan.model.config_class,
        "mtp": plan.model.mtp,
        "next_n": options.mtp,
        "group_names": list(plan.model.group_names),
        "backend": options.backend,
        "deploy_dtype": _deploy_dtype(plan.base),
        "deploy_block_size": _deploy_block_size(plan.model),
        "weights": "checkpoint" if plan.use_hf else "named",
        "wait_seconds": options.limits.seconds,
        "block_size": work.block_size,
        "tp_keys": TP_KEYS,
        "metamorphic": options.checks and options.tp == 1,
    }
    for rank in range(options.tp):
        name = "paged" if rank == 0 else f"paged{rank}"
        job = {
            **target,
            **_prompts(work.prompts, work, work.steps),
            "role": "paged",
            "paths": [str(plan.model.root)],
            "out": str(plan.folder / name),
            "batch_size": work.batch_size,
            "waves": [list(w) for w in work.waves],
            "tp": options.tp,
            "rank": rank,
            "rendezvous": str(plan.folder / "rendezvous"),
        }
        out.append(Child(name, job, python))
    if plan.use_legacy:
        prompts = tuple(max(2, p) for p in work.prompts)
        legacy = plan.legacy
        job = {
            **target,
            **_prompts(prompts, work, work.steps),
            "role": "legacy",
            "trees": [str(legacy.root)],
            "folder": str(legacy.folder),
            "paths": [str(legacy.root)],
            "out": str(plan.folder / "legacy"),
            "batch_size": 1,
            "waves": [],
            "tp": 1,
            "rank": 0,
            "rendezvous": str(plan.folder / "rendezvous-legacy"),
        }
        if legacy.model is not None:
            job.update(
                modeling_module=legacy.model.modeling_module,
                causal_lm=legacy.model.causal_lm,
                config_module=legacy.model.config_module,
                config_class=legacy.model.config_class,
                mtp=legacy.model.mtp,
                group_names=list(legacy.model.group_names),
            )
        out.append(Child("legacy", job, python))
    return out


def _prompts(prompts: tuple[int, ...], work: Workload, steps: int) -> dict[str, Any]:
    return {
        "prompts": list(prompts),
        "prompt_ids": [list(t[:n]) for t, n in zip(work.tokens, prompts, strict=True)],
        "tokens": [list(t) for t in work.tokens],
        "longest": max(prompts),
        "steps": steps,
    }


def _deploy_dtype(base: BaseConfig) -> str:
    for key in ("torch_dtype", "dtype"):
        if isinstance(base.values.get(key), str):
            return str(base.values[key])
    return "bfloat16"


def _deploy_block_size(model: ModelUnderTest) -> int:
    """The block size of the folder's YAMLs; the framework's default where none says."""
    for path in sorted(model.folder.rglob("*.yaml")):
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        section = data.get("scheduler_config") if isinstance(data, dict) else None
        if isinstance(section, dict) and isinstance(section.get("block_size"), int):
            return int(section["block_size"])
    return 128


def _judge(plan: _Plan, outcomes: dict[str, Outcome]) -> VerifyReport:
    model, options, work = plan.model, plan.options, plan.work
    paged, hf, legacy = outcomes["paged"], outcomes.get("hf"), outcomes.get("legacy")
    report = VerifyReport(model.shown, model.root.name, work.seed)
    report.setup = _setup(plan, paged)
    report.notes = [*plan.small.notes, *work.notes]
    report.backend = paged.result.get("backend", {})
    _backend_notes(report, paged)
    references: dict[str, dict[str, Any]] = {}
    report.parties["Paged"] = _party(paged)
    report.parties["HF"] = _hf_party(plan, hf)
    report.parties["Legacy"] = _legacy_party(plan, legacy)
    if not paged.ok:
        report.findings.append(child_finding(paged, model, "Paged"))
        for name, other in outcomes.items():
            if name.startswith("paged") and name != "paged" and not other.ok:
                report.findings.append(child_finding(other, model, f"Paged rank {name[5:]}"))
        report.checks = _checks(paged)
        return report
    report.checks = _checks(paged)
    if not paged.arrays:
        report.findings += problem_findings(report.checks, model)
        return report
    report.checks += _run_checks(paged, work, options.mtp)
    report.checks += _rank_checks(plan, outcomes)
    tolerance = table_tolerance(options.dtype, options.tolerance)
    if hf is not None and hf.ok and hf.arrays:
        references["HF"] = hf.arrays
    if legacy is not None and legacy.ok:
        references["Legacy"] = legacy.arrays
    for name, reference in references.items():
        report.comparisons += compare(name, reference, paged.arrays, list(work.prompts), tolerance)
    observations = dict(paged.result.get("observations", {}))
    observations["groups"] = paged.result.get("groups", {})
    attention = hf.result.get("attention", {}) if hf is not None else {}
    report.findings += difference_findings(report.comparisons, references, paged.arrays, observations, attention, model)
    report.findings += observation_findings(observations, model)
    report.findings += problem_findings(report.checks, model, explained=bool(observations.get("findings")))
    _weigh_oracles(report, references, work, tolerance, model)
    if not references:
        fact = "There is no oracle: " + "; ".join(f"{k}: {v}" for k, v in report.parties.items() if k != "Paged") + "."
        todo = "Give --before-repo or a transformers release that knows the architecture."
        report.findings.append(Diagnostic("KV433", Severity.WARNING, fact, todo, Span(model.shown)))
    return report


def _setup(plan: _Plan, paged: Outcome) -> list[str]:
    work = plan.work
    versions = ", ".join(f"{k} {v}" for k, v in paged.result.get("versions", {}).items())
    backend = paged.result.get("backend", {})
    lines = [
        f"config: {plan.base.source}; {plan.small.layers} layers"
        + (f", window {plan.small.window}" if plan.small.window else ""),
        f"prompts {','.join(map(str, work.prompts))} in {len(work.waves)} waves of at most {work.batch_size}, "
        f"{work.steps} decode steps, block size {work.block_size}, {plan.options.dtype}, tp {plan.options.tp}",
    ]
    if backend:
        lines.append(
            f"operators: {backend.get('kind')}, torch_npu {backend.get('torch_npu')}, profile "
            f"{backend.get('profile')}; {versions}"
        )
    return lines


def _backend_notes(report: VerifyReport, paged: Outcome) -> None:
    report.notes += [str(n) for n in paged.result.get("backend", {}).get("notes", ())]
    report.notes += paged.result.get("notes", [])
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


def _hf_party(plan: _Plan, hf: Outcome | None) -> str:
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


def _legacy_party(plan: _Plan, legacy: Outcome | None) -> str:
    if legacy is None:
        return "not run: --against hf" if plan.options.against == "hf" else f"not run: {plan.legacy.reason}"
    if legacy.ok:
        return f"{plan.legacy.reason}, one prompt at a time, {legacy.seconds:.1f} s"
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


def _rank_checks(plan: _Plan, outcomes: dict[str, Outcome]) -> list[Check]:
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
    worst = max(
        (
            c.relative if not c.nan else float("inf")
            for other in ranks[1:]
            for c in compare("rank", ranks[0].arrays, other.arrays, list(plan.work.prompts), 1e-5)
        ),
        default=0.0,
    )
    out.append(Check("run.ranks-agree", worst <= 1e-5, f"logits of {tp} ranks differ by at most {worst:.1e}"))
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
