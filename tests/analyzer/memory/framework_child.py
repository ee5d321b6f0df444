"""Runs a framework tree's own sizing functions on the meta device and prints what they allocate, as JSON.

Called as `python framework_child.py TREE < request.json`. Only `executor/core/kv_cache` is loaded; packages above it
become empty shells, torch_npu an empty module, and the device has endless free memory.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path

import torch


def load(tree: Path) -> types.ModuleType:
    sys.modules["torch_npu"] = types.ModuleType("torch_npu")
    torch.npu = types.SimpleNamespace(mem_get_info=lambda: (2**60, 2**60))  # type: ignore[attr-defined]
    for name in (
        "executor",
        "executor.core",
        "executor.core.kv_cache",
        "executor.utils",
        "executor.online",
        "executor.online.kv_transfer",
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(tree.joinpath(*name.split(".")))]  # type: ignore[attr-defined]
        sys.modules[name] = module
    utils = sys.modules["executor.utils"]
    utils.align_memory = lambda tensor, alignment: tensor  # type: ignore[attr-defined]
    buffer = types.ModuleType("executor.online.kv_transfer.buffer")
    buffer.HIXL_ALIGNMENT = 2 * 1024 * 1024  # type: ignore[attr-defined]
    sys.modules["executor.online.kv_transfer.buffer"] = buffer
    return importlib.import_module("executor.core.kv_cache.cache_utils")


def allocate(tree: Path, request: dict) -> dict:
    utils = load(tree)
    info = importlib.import_module("executor.core.kv_cache.cache_info")
    run = request["run"]
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(
            batch_size_per_dp_rank=run["batch_per_rank"], mem_fraction_static=0.9, max_prefill_tokens=0
        ),
        model_config=types.SimpleNamespace(next_n=run["next_n"]),
        parallel_config=types.SimpleNamespace(offline_prefill_dp_group_size=run["prefill_dp_group"]),
    )
    on_entry = "block_size" in info.CacheEntry.__dataclass_fields__
    tensors = []
    layers = []
    for index, entries in enumerate(request["layers"]):
        caches = []
        for e in entries:
            extra = {"block_size": run["block_size"]} if on_entry else {}
            if e.get("manager_key"):
                extra["manager_key"] = e["manager_key"]
            caches.append(
                info.CacheEntry(
                    cache_name=e["name"],
                    attn_type=e["attn_type"],
                    dim=e["dim"],
                    num_head=e["num_head"],
                    dtype=getattr(torch, e["dtype"]),
                    needs_block=True,
                    tensor_setter=tensors.append,
                    sliding_window=e["window"],
                    **extra,
                )
            )
        layers.append(info.LayerCacheInfo(layer_idx=index, caches=caches))
    top = {} if on_entry else {"block_size": run["block_size"]}
    cache_info = info.ModelCacheInfo(num_layers=len(layers), layer_infos=layers, **top)
    utils.validate_cache_info(cache_info)
    blocks = utils.calculate_block_num(config, cache_info, offline_max_len=run["max_total_len"])
    utils.allocate_cache_tensors(torch.device("meta"), cache_info, blocks)
    return {"blocks": blocks, "bytes": sum(t.numel() * t.element_size() for t in tensors), "tensors": len(tensors)}


if __name__ == "__main__":
    tree = Path(sys.argv[1])
    print(json.dumps([allocate(tree, r) for r in json.load(sys.stdin)]))
