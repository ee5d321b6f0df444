"""Starts the target's own engine and scheduler, whatever their API era: decided by what they offer, never by date.

The engine, scheduler, KV cache manager and metadata are the tree's own code. Replaced are only: the registry
(it may import every model), the tokenizer (prompts are token ids), and the source of weights.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvskill.verifier.child.groups import Groups
from kvskill.verifier.child.standins import install_registry, install_standins

__all__ = ["PromptTokenizer", "Target", "serves_idle_rows", "start_target"]


class _Encoded:
    def __init__(self, input_ids: Any) -> None:
        self.input_ids = input_ids


class PromptTokenizer:
    """Looks prompts up: text "#3" stands for the token ids of request 3. Pads right with 0 when asked to."""

    eos_token_id = None
    pad_token_id = 0
    padding_side = "right"

    def __init__(self, prompts: dict[str, list[int]]) -> None:
        self.prompts = prompts

    def apply_chat_template(self, prompt: Any, **kwargs: Any) -> str:
        """The text of a chat prompt."""
        return str(prompt[0]["content"])

    def __call__(self, text: str, **kwargs: Any) -> _Encoded:
        import torch

        ids = list(self.prompts[text])
        if kwargs.get("max_length") is not None:
            ids = ids[: kwargs["max_length"]]
            if kwargs.get("padding") == "max_length":
                ids += [self.pad_token_id] * (kwargs["max_length"] - len(ids))
        return _Encoded(torch.tensor([ids], dtype=torch.long))

    def decode(self, ids: Any, **kwargs: Any) -> str:
        """Never needed for a comparison."""
        return ""


@dataclass
class Target:
    """A started engine with its scheduler. `padded` is the 2-D era."""

    engine: Any
    scheduler: Any
    model: Any
    mtp_model: Any
    tokenizer: PromptTokenizer
    groups: Groups
    infer_config: Any
    padded: bool
    config_cls: type
    notes: list[str] = field(default_factory=list)


def prepare_imports(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Paths, stand-ins and registry, before anything of the target is imported."""
    sys.path[:0] = [p for p in job["paths"] if p]
    result["standins"] = install_standins()
    install_registry(job["name"], lambda: _classes(job))
    os.environ.setdefault("LOCAL_RANK", str(job["rank"]))
    os.environ.setdefault("RANK_ID", str(job["rank"]))
    os.environ.setdefault("RANK_OFFSET", "0")
    os.environ["WORLD_SIZE"] = str(job["tp"])
    os.environ["RANK"] = str(job["rank"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # read, not used: the groups meet in a file
    os.environ.setdefault("MASTER_PORT", "1")


def _classes(job: dict[str, Any]) -> tuple[Any, ...]:
    modeling = importlib.import_module(job["modeling_module"])
    config = getattr(importlib.import_module(job["config_module"]), job["config_class"])
    main = getattr(modeling, job["causal_lm"])
    if job["mtp"] and job["next_n"]:
        return main, getattr(modeling, job["mtp"]), config
    return main, config


def start_target(job: dict[str, Any], result: dict[str, Any], on_cache_info: Any) -> Target:
    """Import the model, build the configs, load the weights, set up the cache and warm up.

    `on_cache_info(engine, cache_info)` is called before the engine validates and allocates.
    """
    result["phase"] = "import"
    classes = _classes(job)
    main_cls, config_cls = classes[0], classes[-1]
    mtp_cls = classes[1] if len(classes) == 3 else None
    engine_module = importlib.import_module("executor.core.engine.execution_engine")
    config_module = importlib.import_module("executor.core.config")
    scheduler_module = importlib.import_module("executor.core.scheduler")

    result["phase"] = "engine"
    groups = Groups(job, result)
    groups.install()
    tokenizer = PromptTokenizer({f"#{i}": t for i, t in enumerate(job["prompt_ids"])})
    _serve_tokenizer(tokenizer)
    infer_config = config_module.InferenceConfig.from_dict(
        _yaml(job), global_rank=int(job["rank"]), local_rank=int(job["rank"])
    )
    engine = engine_module.ExecutionEngine(infer_config)
    padded = not hasattr(engine, "kvcache_manager")
    if hasattr(engine, "_init_cache_manager"):
        original = engine._init_cache_manager

        def init_cache_manager(cache_info: Any) -> Any:
            on_cache_info(engine, cache_info)
            return original(cache_info)

        engine._init_cache_manager = init_cache_manager
    result["phase"] = "load"
    load = getattr(engine, "load_model", None) or engine.init
    load(config_cls, main_cls, mtp_cls)
    kwargs: dict[str, Any] = {"tokenizer": engine.tokenizer, "config": infer_config.scheduler_config}
    accepted = inspect.signature(scheduler_module.Scheduler.__init__).parameters
    if "input_truncated_len" in accepted:
        kwargs["input_truncated_len"] = infer_config.data_config.input_truncated_len
    scheduler = scheduler_module.Scheduler(**kwargs)
    return Target(
        engine=engine,
        scheduler=scheduler,
        model=engine.model,
        mtp_model=engine.mtp_model,
        tokenizer=tokenizer,
        groups=groups,
        infer_config=infer_config,
        padded=padded,
        config_cls=config_cls,
    )


def serves_idle_rows(engine: Any) -> bool:
    """Whether the tree builds block tables for fewer requests than rows (before 2026-04-30 it could not: then the
    framework fills a batch with copies of the last prompt). Asked of its own prepare_block_tables."""
    manager = engine.kvcache_manager
    if manager is None:
        return True
    prepare = importlib.import_module("executor.core.kv_cache.cache_utils").prepare_block_tables
    widths = getattr(manager, "get_block_table_max_lens", None)
    width = widths(engine.max_total_len) if widths else engine.block_table_max_len
    request = types.SimpleNamespace(request_id=-1)
    try:
        tables = prepare([request], manager, width, device=engine.device, batch_size=3)
    except (RuntimeError, ValueError):
        return False
    return all(
        table.shape == (3, width[key] if isinstance(width, dict) else width)
        for key, table in tables.items()
        if manager_kind(manager, key) != "Mamba"
    )


def manager_kind(manager: Any, key: str) -> str:
    """attn_type of the block manager with this key."""
    for single in manager.single_type_managers:
        if key in (getattr(single, "manager_key", None), single.attn_type):
            return str(single.attn_type)
    return ""


def _serve_tokenizer(tokenizer: PromptTokenizer) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained = staticmethod(lambda *args, **kwargs: tokenizer)
    registry = sys.modules.get("executor.core.tokenizer_registry")
    if registry is not None:
        served = registry.__dict__["TokenizerRegistry"]
        if hasattr(served, "tokenizers"):
            served.tokenizers.clear()


def _yaml(job: dict[str, Any]) -> dict[str, Any]:
    """The YAML of a run, with the keys of every era: readers take the ones they know."""
    longest, batch, tp = int(job["longest"]), int(job["batch_size"]), int(job["tp"])
    parallel = dict.fromkeys(job["tp_keys"], tp) if tp > 1 else {}
    return {
        "model_config": {
            "model_name": job["name"],
            "model_path": job["ckpt"],
            "output_path": str(Path(job["out"])),
            "with_ckpt": True,
            "exe_mode": job.get("exe_mode", "eager"),
            "next_n": int(job["next_n"]),
            "enable_weight_nz": False,
            "platform_version": "A3",
            "packed_sequence": True,
            "custom_params": job.get("custom_params", {}),
        },
        "data_config": {"dataset": "default", "input_truncated_len": longest},
        "parallel_config": {"world_size": tp, **parallel},
        "scheduler_config": {
            "batch_size": batch,
            "max_new_tokens": int(job["steps"]),
            "max_prefill_tokens": longest * batch,
            "block_size": int(job["block_size"]),
            "input_max_len": longest,
            "prefill_mini_batch": batch,
        },
    }
