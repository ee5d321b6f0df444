"""One verification from start to report: config, children, figures, findings."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvskill.diagnostics import Diagnostic, InputError, Refusal, Severity, Span
from kvskill.manifest import MANIFEST_NAME
from kvskill.verifier.before import find_legacy
from kvskill.verifier.discover import find_model
from kvskill.verifier.jobs import Child, Outcome, run_children
from kvskill.verifier.judge import judge
from kvskill.verifier.modelconfig import base_config, shrink
from kvskill.verifier.options import Limits, VerifyOptions
from kvskill.verifier.plan import Plan, make_children
from kvskill.verifier.report import VerifyReport
from kvskill.verifier.standalone.run import is_standalone, verify_standalone
from kvskill.verifier.workload import make_workload

__all__ = ["Runner", "verify_model"]

Runner = Callable[[list[Child], Limits], dict[str, Outcome]]


def verify_model(options: VerifyOptions, runner: Runner = run_children) -> VerifyReport:
    """Verify one model. Raises InputError when it cannot be run at all (KV430 to KV437), Refusal for kept Legacy.

    `runner` runs the child jobs; tests that verify many variants of one model give one that shares work.
    """
    if is_standalone(options):
        return verify_standalone(options)
    start = time.monotonic()
    model = find_model(options.model, options.repo)
    if model.manifest is not None and model.manifest.kv_mode.value == "legacy" and not model.has_cache_info:
        raise Refusal(
            Diagnostic(
                "KV438",
                Severity.BLOCKING,
                "The manifest keeps the Legacy cache: there is no Paged code to compare.",
                "Nothing is to be verified here; `kv_grounds` of the manifest says why.",
                Span(f"{model.folder.relative_to(model.root).as_posix()}/{MANIFEST_NAME}"),
            )
        )
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
        plan = Plan(
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
        plan.ckpt.mkdir()
        (plan.ckpt / "config.json").write_text(json.dumps(small.values, indent=1), encoding="utf-8")
        (plan.ckpt / "generation_config.json").write_text("{}", encoding="utf-8")
        # a checkpoint without tensors: what loaders look for where no oracle makes one
        (plan.ckpt / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        report = judge(plan, runner(make_children(plan), options.limits))
        report.seconds = time.monotonic() - start
        return report
    finally:
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
