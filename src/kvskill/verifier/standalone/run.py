"""One verification of a standalone model: old and new runner with the same weights, and HF."""

from __future__ import annotations

import ast
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvskill.analyzer.selection.deployment import find_runners
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import MANIFEST_NAME, load_manifest
from kvskill.source import read_source
from kvskill.verifier.compare import Comparison, table_tolerance
from kvskill.verifier.discover import ORIGINALS, ModelUnderTest, _resolve, find_target
from kvskill.verifier.jobs import Child, Outcome, run_children
from kvskill.verifier.modelconfig import base_config, shrink
from kvskill.verifier.options import DEFAULT_PROMPTS, VerifyOptions
from kvskill.verifier.report import Check, VerifyReport

__all__ = ["is_standalone", "verify_standalone"]

FIRST_TOKEN = 3


def is_standalone(options: VerifyOptions) -> bool:
    """The manifest says so, or the folder has a runner of its own and no manifest."""
    folder = options.model
    if not folder.is_dir():
        return False
    path = folder / MANIFEST_NAME
    if path.is_file():
        return load_manifest(path, MANIFEST_NAME).deployment.value == "standalone"
    runners = find_runners(folder.resolve(), folder.resolve().parent)
    return bool(runners) and not any(r.framework for r in runners)


def verify_standalone(options: VerifyOptions) -> VerifyReport:
    """Verify one standalone model. Raises InputError when it cannot be run at all."""
    start = time.monotonic()
    folder = options.model.resolve()
    root = (options.repo.resolve() if options.repo else find_target(folder)) or folder.parent
    model = _resolve(root, folder)
    runner = _runner(folder)
    if options.tp != 1:
        raise InputError(
            Diagnostic("KV430", Severity.ERROR, "Standalone runners are verified at tp 1.", "Drop --tp.", Span("--tp"))
        )
    small = shrink(base_config(model, options.config), model, 1, False)
    work = Path(tempfile.mkdtemp(prefix="kvskill-verify-"))
    try:
        report = VerifyReport(model.shown, root.name, options.seed)
        report.notes = [*small.notes]
        outcomes, prompts = _run(options, model, runner, small.values, work)
        _judge(report, outcomes, prompts, options, model)
        report.seconds = time.monotonic() - start
        return report
    finally:
        if options.keep is not None:
            shutil.copytree(work, options.keep, dirs_exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)


def _runner(folder: Path) -> tuple[str, str]:
    """(module, class) of the runner: the class with `model_generate`."""
    for path in sorted(folder.glob("runner_*.py")):
        for node in read_source(path, path.name).tree.body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(i, ast.FunctionDef) and i.name == "model_generate" for i in node.body
            ):
                return path.stem, node.name
    raise InputError(
        Diagnostic(
            "KV431",
            Severity.ERROR,
            "No class with `model_generate` was found in runner_*.py.",
            "Give the loop this name: warm-up and timing call it.",
            Span(folder.name),
        )
    )


def _run(
    options: VerifyOptions, model: ModelUnderTest, runner: tuple[str, str], config: dict[str, Any], work: Path
) -> tuple[dict[str, Outcome], list[list[int]]]:
    rng = random.Random(options.seed)
    lengths = [max(2, n) for n in options.prompts or DEFAULT_PROMPTS]
    vocab = int(config["vocab_size"])
    prompts = [[rng.randrange(FIRST_TOKEN, vocab) for _ in range(n)] for n in lengths]
    ckpt = work / "ckpt"
    ckpt.mkdir()
    (ckpt / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    python = options.python or sys.executable
    common = {
        "seed": options.seed,
        "ckpt": str(ckpt),
        "config": str(ckpt / "config.json"),
        "prompt_ids": prompts,
        "steps": options.decode_steps,
        "trees": [str(model.root)],
        "folder": str(model.folder),
    }
    outcomes: dict[str, Outcome] = {}
    hf = Child("hf", {**common, "role": "hf-greedy", "out": str(work / "hf")}, sys.executable)
    outcomes |= run_children([hf], options.limits)
    children = []
    before = _before(options, model, work)
    for side, folder in (("new", model.folder), ("old", before)):
        if folder is None:
            continue
        job = {
            **common,
            "role": "runner",
            "side": side,
            "out": str(work / side),
            "folder": str(folder),
            "paths": [str(model.root)],
            "trees": [str(folder), str(model.root)],
            "backend": options.backend,
            "deploy_block_size": 128,
            "runner_module": runner[0],
            "runner_class": runner[1],
            "settings": _settings(options, model, max(lengths), len(lengths) if side == "new" else 1, ckpt, config),
            "rendezvous": str(work / f"meet-{side}"),
        }
        children.append(Child(side, job, python))
    outcomes |= run_children(children, options.limits)
    return outcomes, prompts


def _before(options: VerifyOptions, model: ModelUnderTest, work: Path) -> Path | None:
    """The model folder before the conversion: saved originals, or the folder of --before-repo."""
    if options.before_repo is not None:
        folder = options.before_repo.resolve() / model.folder.relative_to(model.root)
        return folder if folder.is_dir() else None
    originals = model.folder / ORIGINALS
    if not originals.is_dir():
        return None
    dest = work / "before" / model.folder.name
    shutil.copytree(model.folder, dest, ignore=shutil.ignore_patterns(".kvskill", "__pycache__"))
    for path in sorted(p for p in originals.rglob("*") if p.is_file()):
        shutil.copy2(path, dest / path.relative_to(originals))
    return dest


def _settings(
    options: VerifyOptions, model: ModelUnderTest, longest: int, rows: int, ckpt: Path, config: dict[str, Any]
) -> dict[str, Any]:
    """The folder's YAML for one rank, the test's sizes in every key that holds one.

    The cache is exactly as long as the longest row gets (prompt and all but the last new token, which is not cached),
    so that the run fills it to the end.
    """
    paths = sorted(model.folder.rglob("*.y*ml"))
    data: dict[str, Any] = {}
    for path in paths:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(loaded, dict) and "model_config" in loaded:
            data = loaded
            break
    length = longest + options.decode_steps - 1
    data.setdefault("model_name", model.name)
    data.update(model_path=str(ckpt), world_size=1, exe_mode="eager")
    sections: dict[str, dict[str, Any]] = {}
    for name in ("model_config", "data_config", "parallel_config", "scheduler_config"):
        sections[name] = dict(data.get(name) or {})
    sections["model_config"].update(
        model_path=str(ckpt),
        model_name=model.name,
        with_ckpt=True,
        exe_mode="eager",
        enable_profiler=False,
        enable_cache_compile=False,
        enable_online_split_weight=True,
        enable_weight_nz=False,
        max_seq_len=length,
        pa_max_length=length,
        pa_block_size=options.block_size,
    )
    sections["data_config"].update(
        dataset="default",
        input_max_len=longest,
        input_truncated_len=longest,
        max_new_tokens=options.decode_steps,
        batch_size=rows,
        batch_size_per_rank=rows,
        max_position_embeddings=length,
    )
    sections["scheduler_config"].update(
        batch_size=rows, max_new_tokens=options.decode_steps, max_prefill_tokens=longest * rows
    )
    parallel = dict.fromkeys(sections["parallel_config"], 1)
    for kind in ("attn", "moe", "embed", "lmhead", "dense", "o_proj"):
        for way in ("tp", "dp"):
            parallel[f"{kind}_{way}_size"] = 1
    sections["parallel_config"] = {**parallel, "world_size": 1, "moe_ep_size": 1}
    return {**data, **sections}


def _judge(
    report: VerifyReport,
    outcomes: dict[str, Outcome],
    prompts: list[list[int]],
    options: VerifyOptions,
    model: ModelUnderTest,
) -> None:
    new, old, hf = outcomes["new"], outcomes.get("old"), outcomes["hf"]
    lengths = [len(p) for p in prompts]
    report.setup = [
        f"prompts {','.join(map(str, lengths))} in one batch, {options.decode_steps} new tokens each, block size "
        f"{options.block_size}, cache length {max(lengths) + options.decode_steps - 1}, float32, tp 1"
    ]
    report.backend = new.result.get("backend", {})
    for name, outcome in (("new runner", new), ("old runner", old), ("HF", hf)):
        report.parties[name] = _party(outcome)
    if not new.ok:
        report.findings.append(_failed(new, "The new runner", model))
        return
    report.notes += [f"padding {side}: {how}" for side, how in new.result["runs"].items()]
    report.notes += _times(new, old)
    served = new.result.get("groups_served")
    if served:
        report.notes.append(f"one-process group served at world size 1: {', '.join(sorted(served))}")
    tolerance = table_tolerance("fp32", options.tolerance)
    references: dict[str, dict[str, Any]] = {}
    if old is not None and old.ok:
        references["old"] = {k.removeprefix("right/"): v for k, v in old.arrays.items()}
    elif old is not None:
        report.findings.append(_failed(old, "The old runner", model, Severity.WARNING))
    if hf.ok and hf.arrays:
        references["HF"] = hf.arrays
    for oracle, reference in references.items():
        for side in ("right", "left"):
            for request, prompt in enumerate(lengths):
                if f"{side}/logits/{request}" in new.arrays:
                    report.comparisons.append(
                        _compare(f"{oracle}, {side}", reference, new.arrays, side, request, prompt, tolerance)
                    )
    for c in report.comparisons:
        if not c.ok:
            fact = (
                f"Request {c.request} differs from {c.oracle} padding by {c.relative:.2e} (bound {c.tolerance:.0e}) "
                f"from position {c.first_bad}."
            )
            todo = "Check slots, lengths and the mask of the step."
            report.findings.append(Diagnostic("KV400", Severity.ERROR, fact, todo, Span(model.shown)))
    report.checks = _checks(new, lengths, options)
    for check in report.checks:
        if check.ok is False:
            fact = f"Check {check.name} fails: {check.text}."
            report.findings.append(
                Diagnostic("KV405", Severity.ERROR, fact, "See the check's figures.", Span(model.shown))
            )
    if not references:
        fact = "There is no oracle: neither the old runner nor HF ran."
        todo = "Give --before-repo, or a config with a model_type that transformers knows."
        report.findings.append(Diagnostic("KV433", Severity.WARNING, fact, todo, Span(model.shown)))


def _compare(
    oracle: str, reference: dict[str, Any], tested: dict[str, Any], side: str, request: int, prompt: int, bound: float
) -> Comparison:
    """Logits of every step and the greedy tokens: a token that differs counts as a difference at its position."""
    ref, got = reference[f"logits/{request}"], tested[f"{side}/logits/{request}"]
    ref_tokens, got_tokens = reference[f"tokens/{request}"], tested[f"{side}/tokens/{request}"]
    steps = min(len(ref), len(got))
    scale = float(np.abs(ref[:steps]).max()) or 1.0
    worst, first, nan = 0.0, None, 0
    for step in range(steps):
        bad = bool(np.isnan(got[step]).any())
        nan += bad
        difference = float("inf") if bad else float(np.abs(got[step] - ref[step]).max()) / scale
        worst = max(worst, 0.0 if bad else difference)
        if first is None and (difference > bound or ref_tokens[step] != got_tokens[step]):
            first = prompt - 1 + step
    above = int(first is not None)
    return Comparison(
        oracle, request, prompt, steps, worst, nan, bound, first, abs(len(ref) - len(got)), above, 0
    )


def _checks(new: Outcome, lengths: list[int], options: VerifyOptions) -> list[Check]:
    """The three links in runner form: allocation, metadata of each step, reuse."""
    facts, out = new.result.get("facts", {}), []
    shape, size = facts.get("cache_shape"), options.block_size
    if shape is None:
        return [Check("runner.allocation", False, "no step carried paged metadata")]
    rows = len(lengths)
    blocks = -(-(max(lengths) + options.decode_steps - 1) // size)
    good = shape[:2] == [rows * blocks, size] and len(shape) == 4 and facts["table"] == [rows, blocks]
    good = good and facts["table_dtype"] == "torch.int32" and facts["storages"] == 2 * facts["layers"]
    text = f"caches {shape}, table {facts['table']} {facts['table_dtype']}, {facts['storages']} own storages"
    out.append(Check("runner.allocation", good, text))
    problems = new.result.get("problems", [])
    text = "; ".join(problems) or f"{facts['steps']} steps: slots, lengths and positions follow the block table"
    out.append(Check("runner.metadata", not problems, text))
    first = facts.get("first_decode")
    out.append(
        Check("runner.kv-length", first == [n + 1 for n in lengths], f"first decode has key lengths {first}")
    )
    worst = 0.0
    for request in range(rows):
        a, b = new.arrays[f"right/logits/{request}"], new.arrays[f"again/logits/{request}"]
        worst = max(worst, float("inf") if a.shape != b.shape else float(np.abs(a - b).max()))
    out.append(Check("runner.reuse", worst <= 1e-5, f"a later model_generate differs by at most {worst:.1e}"))
    stages = new.result.get("times", {})
    ok = {"prefill", "decode"} <= set(stages)
    found = ", ".join(sorted(stages)) or "none"
    out.append(Check("runner.log-lines", ok, f"`inference time cost of` lines for {found}"))
    return out


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


def _party(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run: no saved originals and no --before-repo"
    if "unsupported" in outcome.result:
        return f"not run: {outcome.result['unsupported']}"
    if outcome.ok:
        return f"ran, {outcome.seconds:.1f} s"
    message = " ".join(str((outcome.error or {}).get("message", outcome.died)).split())[:200]
    return f"failed in phase {outcome.result.get('phase', 'start')}: {message}"


def _failed(
    outcome: Outcome, who: str, model: ModelUnderTest, severity: Severity = Severity.ERROR
) -> Diagnostic:
    error = outcome.error or {}
    place = error.get("model") or error.get("target")
    span = Span(place["file"], int(place["line"])) if place else Span(model.shown)
    message = " ".join(str(error.get("message", outcome.died)).split())[:300]
    fact = f"{who} fails in phase {outcome.result.get('phase')} ({error.get('type', '')} {message})."
    todo = "Run it with --keep and read log.txt."
    release = str(outcome.result.get("versions", {}).get("transformers", ""))
    if outcome.result.get("phase") in ("import", "load") and release.split(".")[0].isdigit():
        # configs changed their fields between major releases
        todo = f"Give the interpreter of the target's own transformers with --python (this one has {release})."
    return Diagnostic("KV409", severity, fact, todo, span)
