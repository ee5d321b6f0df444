"""One verification of a standalone model: old and new runner with the same weights, and HF."""

from __future__ import annotations

import ast
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvskill.analyzer.resolve import find_repo
from kvskill.analyzer.selection.deployment import find_runners
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import MANIFEST_NAME, load_manifest
from kvskill.source import read_source
from kvskill.verifier.discover import ORIGINALS, ModelUnderTest, find_folder, find_target, resolve_model
from kvskill.verifier.jobs import Child, Outcome, run_children
from kvskill.verifier.modelconfig import SmallConfig, base_config, shrink, text_settings
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.report import VerifyReport
from kvskill.verifier.standalone.judge import Run, judge
from kvskill.verifier.standalone.settings import Sizes, folder_settings, runner_settings

__all__ = ["is_standalone", "verify_standalone"]

FIRST_TOKEN = 3


@dataclass(frozen=True)
class _Before:
    """The old folder and the tree that it is imported from; `reason` says where it comes from, or why there is none."""

    folder: Path | None
    root: Path | None
    reason: str


def is_standalone(options: VerifyOptions) -> bool:
    """The manifest says so, or the folder has a runner of its own and no manifest."""
    try:
        folder = find_folder(options.model, options.repo)
    except InputError:  # the framework path names it
        return False
    path = folder / MANIFEST_NAME
    if path.is_file():
        return load_manifest(path, MANIFEST_NAME).deployment.value == "standalone"
    runners = find_runners(folder, folder.parent)
    return bool(runners) and not any(r.framework for r in runners)


def verify_standalone(options: VerifyOptions) -> VerifyReport:
    """Verify one standalone model. Raises InputError when it cannot be run at all."""
    start = time.monotonic()
    _only_what_is_done(options)
    folder = find_folder(options.model, options.repo)
    # older trees have an executor without executor/core
    root = options.repo.resolve() if options.repo else find_target(folder) or find_repo(folder) or folder.parent
    model = resolve_model(root, folder)
    runner = _runner(folder)
    data = folder_settings(model)
    small = shrink(base_config(model, options.config), model, options.tp, False)
    work = Path(tempfile.mkdtemp(prefix="kvskill-verify-"))
    try:
        before = _before(options, model, work)
        lengths = list(options.prompts or _default_lengths(options.block_size, small.window))
        run = _run(options, model, runner, small, data, before, lengths, work)
        report = VerifyReport(model.shown, root.name, options.seed)
        report.notes = [*small.notes]
        if small.window is not None and max(lengths) <= small.window:
            report.notes.append(f"no prompt is longer than the window of {small.window} keys")
        judge(report, run)
        report.seconds = time.monotonic() - start
        return report
    finally:
        if options.keep is not None:
            shutil.copytree(work, options.keep, dirs_exist_ok=True)
        shutil.rmtree(work, ignore_errors=True)


def _default_lengths(block_size: int, window: int | None) -> list[int]:
    """One token, a prompt that ends with its block, one that does not; with a window, one that crosses it in decode
    and one that is longer.
    """
    lengths = [5, 1, block_size, block_size + 1]
    return lengths if window is None else [*lengths, max(2, window - 4), window + block_size + 3]


def _only_what_is_done(options: VerifyOptions) -> None:
    """An option that would be ignored is refused: its figures would say something else than asked for."""
    for asked, flag in ((options.dtype != "fp32", "--dtype"), (options.mtp, "--mtp"), (options.long, "--long")):
        if asked:
            fact = f"Standalone runners are verified in float32, without drafts; {flag} is not done there."
            raise InputError(Diagnostic("KV430", Severity.ERROR, fact, f"Drop {flag}.", Span(flag)))


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
    options: VerifyOptions,
    model: ModelUnderTest,
    runner: tuple[str, str],
    small: SmallConfig,
    data: dict[str, Any],
    before: _Before,
    lengths: list[int],
    work: Path,
) -> Run:
    rng = random.Random(options.seed)
    vocab = text_settings(small.values).get("vocab_size")
    if not isinstance(vocab, int):
        fact = "The config has no vocab_size, at the top or in its text part."
        todo = "Give the model's config.json with --config."
        raise InputError(Diagnostic("KV435", Severity.ERROR, fact, todo, Span(model.shown)))
    prompts = [[rng.randrange(FIRST_TOKEN, vocab) for _ in range(n)] for n in lengths]
    ckpt = work / "ckpt"
    ckpt.mkdir()
    (ckpt / "config.json").write_text(json.dumps(small.values, indent=1), encoding="utf-8")
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
    named = not any(ckpt.glob("*.safetensors"))  # transformers does not know the model: weights by parameter name
    if named and options.tp > 1:
        fact = "transformers does not build this model, and without its checkpoint ranks have no common weights."
        todo = "Drop --tp, or give a config that transformers knows."
        raise InputError(Diagnostic("KV430", Severity.ERROR, fact, todo, Span("--tp")))
    sizes = Sizes(max(lengths), len(lengths), options.decode_steps, options.block_size, options.tp)

    def job(side: str, name: str, folder: Path, root: Path, wanted: Sizes) -> dict[str, Any]:
        return {
            **common,
            "role": "runner",
            "side": side,
            "out": str(work / name),
            "folder": str(folder),
            "paths": [str(root)],
            "trees": [str(folder), str(root)],
            "backend": options.backend,
            "deploy_block_size": 128,
            "waive": list(options.waive),
            "named_weights": named,
            "runner_module": runner[0],
            "runner_class": runner[1],
            "settings": runner_settings(data, model.name, wanted, ckpt, named),
            "tp": wanted.tp,
            "rank": 0,
            "rendezvous": str(work / f"meet-{side}"),
        }

    children = []
    for rank in range(options.tp):
        name = "new" if rank == 0 else f"new{rank}"
        new = {**job("new", name, model.folder, model.root, sizes), "rank": rank}
        if options.checks:
            one, short = replace(sizes, rows=1), _too_short(sizes)
            new["settings_alone"] = runner_settings(data, model.name, one, ckpt, named)
            new["settings_short"] = runner_settings(data, model.name, short, ckpt, named)
        children.append(Child(name, new, python))
    if before.folder is not None and before.root is not None and options.against != "hf":
        # each prompt by itself and without padding, also where the runner pads to a fixed length
        ones = [replace(sizes, rows=1, tp=1, longest=n) for n in lengths]
        old = job("old", "old", before.folder, before.root, ones[0])
        old["settings_by_request"] = [runner_settings(data, model.name, one, ckpt, named) for one in ones]
        children.append(Child("old", old, python))
    outcomes |= run_children(children, options.limits)
    return Run(options, model, outcomes, lengths, sizes, before.reason, named)


def _too_short(sizes: Sizes) -> Sizes:
    """One position too few, and no room for it in the last block where the steps allow that."""
    blocks = (sizes.longest + sizes.steps - 2) // sizes.block_size
    steps = blocks * sizes.block_size + 2 - sizes.longest
    return replace(sizes, steps=steps if 1 <= steps <= sizes.steps else sizes.steps, short=1)


def _before(options: VerifyOptions, model: ModelUnderTest, work: Path) -> _Before:
    """The model before the conversion: the folder of --before-repo, or the saved originals. Raises InputError KV434."""
    relative = model.folder.relative_to(model.root)
    if options.before_repo is not None:
        root = options.before_repo.resolve()
        if not (root / relative).is_dir():
            raise InputError(
                Diagnostic(
                    "KV434",
                    Severity.ERROR,
                    f"The before-repository has no {relative.as_posix()}.",
                    "Give the tree in which the old runner runs.",
                    Span(str(options.before_repo)),
                )
            )
        return _Before(root / relative, root, f"from {options.before_repo.name}")
    originals = model.folder / ORIGINALS
    if not originals.is_dir():
        return _Before(None, None, "no saved originals and no --before-repo")
    dest = work / "before" / model.folder.name
    shutil.copytree(model.folder, dest, ignore=shutil.ignore_patterns(".kvskill", "__pycache__"))
    for path in sorted(p for p in originals.rglob("*") if p.is_file()):
        name = path.relative_to(originals)
        if name.is_relative_to(relative):  # kept by repository path
            name = name.relative_to(relative)
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, dest / name)
    return _Before(dest, model.root, "saved originals")
