"""Framework runs of the ledger: embedded models, converted and verified in the embedded target or their own runner."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvskill.diagnostics import ExitCode
from kvskill.embedded import ERAS, MODELS, RUNNERS, materialise, materialise_runner
from kvskill.manifest import MANIFEST_NAME, Manifest, load_manifest
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.report import VerifyReport
from kvskill.verifier.run import verify_model
from kvskill.verifier.templates.ledger import round_up

__all__ = ["FrameworkRun", "framework_runs", "templates_used"]

# Values of config.json that lead a model to templates which its own values do not reach.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny_dense-d80": ("tiny_dense", {"head_dim": 80, "hidden_size": 192}),  # a head size that TND does not take
}


@dataclass(frozen=True)
class FrameworkRun:
    """One converted model: its worst figure and the templates in it, or why it does not count."""

    worst: float | None
    templates: tuple[str, ...]
    failed: str | None = None


def framework_runs() -> dict[str, FrameworkRun]:
    """By "model@era" or "folder@runner": every embedded model in every era that it can be converted for. A failure
    is kept."""
    models: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in MODELS} | VARIANTS
    out: dict[str, FrameworkRun] = {}
    with tempfile.TemporaryDirectory(prefix="kvskill-framework-") as folder:
        for shown, (model, changes) in models.items():
            paged = [era for era in ERAS if era >= "2026-04"]
            for era in paged if MODELS[model].era >= "2026-04" else paged[:1]:
                key = f"{shown}@{era}"
                out[key] = _run(Path(folder) / key, model, era, changes)
        for name in RUNNERS:
            out[f"{name}@runner"] = _runner_run(Path(folder) / name, name)
    return out


def _runner_run(tree: Path, name: str) -> FrameworkRun:
    folder, config = materialise_runner(tree, name)
    failed = _convert(folder, "--config", str(config))
    if failed is not None:
        return failed
    report = verify_model(VerifyOptions(model=folder, config=config))
    latent = any(g.attention == "MLA" for g in load_manifest(folder / MANIFEST_NAME).groups)
    used = ("standalone/latent_absorb", "standalone/latent_attend") if latent else ("standalone/attend",)
    return _outcome(report, (*used, "standalone/paged_kv"))


def _convert(folder: Path, *given: str) -> FrameworkRun | None:
    """Analyze and apply; a run that failed, if one of them did."""
    for command in ("analyze", "apply"):
        argv = [sys.executable, "-m", "kvskill", command, str(folder), *given]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            return FrameworkRun(None, (), f"`kvskill {command}` exits {done.returncode}: {done.stdout[-300:]}")
    return None


def _outcome(report: VerifyReport, used: tuple[str, ...]) -> FrameworkRun:
    if report.exit_code != ExitCode.DONE or not report.comparisons:
        return FrameworkRun(None, used, "; ".join(f.fact for f in report.findings) or "compared with nothing")
    return FrameworkRun(round_up(max(c.relative for c in report.comparisons)), used)


def _run(tree: Path, model: str, era: str, changes: dict[str, Any]) -> FrameworkRun:
    folder = materialise(tree, era, [model]) / "models" / model
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    failed = _convert(folder)
    if failed is not None:
        return failed
    report = verify_model(VerifyOptions(model=folder, against="both" if MODELS[model].era == era else "hf"))
    return _outcome(report, templates_used(load_manifest(folder / MANIFEST_NAME)))


def templates_used(manifest: Manifest) -> tuple[str, ...]:
    """The framework templates that a conversion with this manifest writes."""
    used = {"framework/last_token"}
    for group in manifest.groups:
        used.add("framework/cache_entries")
        if group.attention == "MLA":
            used |= {"framework/mla_attend", "framework/mla_absorb", "framework/mla_cache_info"}
            continue
        dense = group.prefill is not None and group.prefill.layout == "BNSD"
        used |= {"framework/attend_head", "framework/get_cache_info"}
        used.add("framework/attend_dense" if dense else "framework/attend")
    return tuple(sorted(used))
