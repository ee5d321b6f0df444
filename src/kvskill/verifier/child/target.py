"""Runs a target model in its own framework: several runs over one set of weights, each with its own conditions.

Roles: "paged" runs requests in waves with poisoned, permuted blocks; "legacy" runs one prompt at a time.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvskill.verifier.child.standins import block

__all__ = ["run_target"]

FINITE_POISON = 3.0e4
# Errors that a device does not refuse: it computes something else. They are reported, and the run goes on.
# With drafts the framework pads its batch with rows of next_n + 1 queries over one key; their outputs are dropped.
IDLE_DRAFT_RULES = frozenset({"fa-queries-fit"})
NOTED_RULES = ("fa-mask-contents", "fa-mask-outside-band", "fa-one-token-mask")


def run_target(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Start the target, run the job's role, write arrays.npz and fill `result`."""
    from kvskill.verifier.child.framework import prepare_imports, start_target

    result["phase"] = "backend"
    info = _install_backend(job)
    result["backend"] = info.to_json()
    if info.kind == "npu":  # the device's attention takes no float32
        job["dtype"] = "bf16"
    result["dtype"] = job["dtype"]
    job["comm"] = "hccl" if info.kind == "npu" else "gloo"
    result["idle_draft_rules"] = sorted(IDLE_DRAFT_RULES) if job["next_n"] else []
    import torch

    torch.set_num_threads(int(job["threads"]))
    logging.disable(logging.WARNING)
    prepare_imports(job, result)
    if job["dtype"] == "fp32":
        _alias_dtype()
    else:
        from kvskill.verifier.child.promote import PromoteProducts

        PromoteProducts().__enter__()
    _wait_for_checkpoint(job, result)
    from kvskill.verifier.child.loading import hook_loading

    hook_loading(job, result)
    from kvskill.verifier.child.caches import Caches

    caches = Caches()
    seen: list[Any] = []

    def on_cache_info(engine: Any, cache_info: Any) -> None:
        result["phase"] = "init-cache"
        seen.append(cache_info)
        caches.watch(cache_info)

    target = start_target(job, result, on_cache_info)
    result["versions"] = _versions()
    result["padded"] = target.padded
    from kvskill.verifier.child.links import init_link

    init_link(target, seen[0] if seen else None, caches, result)
    result["phase"] = "warm-up"
    target.engine.warm_up()
    if job["role"] == "paged":
        from kvskill.verifier.child.paged import run_paged

        arrays = run_paged(target, caches, seen[0] if seen else None, job, result)
    else:
        from kvskill.verifier.child.legacy import run_legacy

        arrays = run_legacy(target, caches, job, result)
    result["groups_served"] = sorted(target.groups.served)
    result["ranks"] = target.groups.ranks
    result["ranks_corrected"] = sorted(target.groups.corrected)
    np.savez(Path(job["out"]) / "arrays.npz", **arrays)


def _install_backend(job: dict[str, Any]) -> Any:
    from kvskill.verifier.backend import OpContext, install, installed

    if installed() is None:
        _transformers_without_npu()

    context = OpContext(
        dtype=job["deploy_dtype"],
        block_size=job["deploy_block_size"],
        null_slots=int(job["block_size"]),
        enforce=job["role"] == "paged",  # the Legacy code is an oracle, not on trial
        waive=frozenset(job["waive"]) | (IDLE_DRAFT_RULES if job.get("next_n") else frozenset()),
        note=frozenset(NOTED_RULES),
    )
    return install(job["backend"], context=context)


def _transformers_without_npu() -> None:
    """Let transformers decide, once and before any stand-in is there, that it need not care about torch_npu."""
    block("torch_npu")
    try:
        from transformers.utils import is_torch_npu_available

        is_torch_npu_available()
    finally:
        del sys.modules["torch_npu"]


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _alias_dtype() -> None:
    """bfloat16 is hard-coded in models; for this run the name means float32, which separates errors from rounding."""
    import safetensors.torch  # noqa: F401  its dtype table must be built with the real names
    import torch
    import transformers  # noqa: F401

    torch.bfloat16 = torch.float32
    torch.Tensor.bfloat16 = torch.Tensor.float
    torch.nn.Module.bfloat16 = torch.nn.Module.float


def _wait_for_checkpoint(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Import what takes long while the weights are being made elsewhere, then wait for them."""
    result["phase"] = "import"
    import importlib

    importlib.import_module(job["modeling_module"])
    result["phase"] = "wait"
    if job["weights"] != "checkpoint":
        return
    ready, end = Path(job["ckpt"]) / "READY", time.monotonic() + float(job["wait_seconds"])
    while not ready.is_file():
        if (Path(job["ckpt"]) / "FAILED").is_file():
            job["weights"] = "named"
            return
        if time.monotonic() > end:
            raise TimeoutError("the checkpoint was not written in time")
        time.sleep(0.05)


class Tap:
    """Hidden states of the layers and operator calls, both by layer, of one forward pass at a time."""

    def __init__(self, model: Any) -> None:
        from kvskill.verifier.child.hidden import LayerTap

        self.layers = LayerTap(model)

    def clear(self) -> None:
        """Forget the last pass."""
        self.layers.clear()
        self.layers.current = None

    def rows(self) -> dict[str, list[Any]]:
        """Hidden states by layer and kind."""
        return self.layers.rows()

    @contextlib.contextmanager
    def calls(self, record: bool) -> Iterator[list[tuple[int | None, Any]]]:
        """(layer, record) of every operator call in the block; filled when the block ends."""
        from kvskill.verifier.backend import record_calls

        out: list[tuple[int | None, Any]] = []
        if not record:
            yield out
            return
        marks: list[tuple[int, int | None]] = []
        with record_calls() as calls:
            self.layers.on_enter = lambda index: marks.append((len(calls), index))
            try:
                yield out
            finally:
                self.layers.on_enter = None
        layer: int | None = None
        starts = dict(marks)
        for index, call in enumerate(calls):
            layer = starts.get(index, layer)
            out.append((layer, call))
