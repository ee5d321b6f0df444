"""The child processes of a verification: who runs what, with which values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvskill.analyzer.data import load_yaml
from kvskill.verifier.before import LegacySource
from kvskill.verifier.discover import ModelUnderTest
from kvskill.verifier.jobs import Child
from kvskill.verifier.modelconfig import BaseConfig, SmallConfig
from kvskill.verifier.options import VerifyOptions
from kvskill.verifier.workload import Workload

__all__ = ["Plan", "make_children"]

TP_KEYS = ("attn_tp_size", "moe_tp_size", "embed_tp_size", "lmhead_tp_size", "dense_tp_size", "o_proj_tp_size")


@dataclass(frozen=True)
class Plan:
    """Everything that was decided before a process starts. `folder` is a temporary one."""

    options: VerifyOptions
    model: ModelUnderTest
    base: BaseConfig
    small: SmallConfig
    work: Workload
    folder: Path
    legacy: LegacySource
    use_hf: bool
    use_legacy: bool

    @property
    def ckpt(self) -> Path:
        """The checkpoint folder: config.json now, weights when the oracle has made them."""
        return self.folder / "ckpt"


def make_children(plan: Plan) -> list[Child]:
    """The jobs, HF first: it makes the checkpoint that the others wait for."""
    options, work, ckpt = plan.options, plan.work, plan.ckpt
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
        "deploy_dtype": load_yaml("target_profile.yaml")["run_dtype"],
        "deploy_block_size": _deploy_block_size(plan.model),
        "weights": "checkpoint" if plan.use_hf else "named",
        "wait_seconds": options.limits.seconds,
        "block_size": work.block_size,
        "tp_keys": TP_KEYS,
        "waive": list(options.waive),
        "metamorphic": options.checks and options.tp == 1,
    }
    repeated = options.checks and options.tp == 1
    later = min(7, work.steps) if repeated else 0
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
            "longest": max(work.prompts) + later,
            "later": later,
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
