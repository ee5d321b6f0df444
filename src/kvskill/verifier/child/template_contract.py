"""Cache entries and cache info of templates, against the embedded target's own validation and allocation."""

from __future__ import annotations

import importlib
import sys
import tempfile
import textwrap
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvskill.verifier.templates.render import render_case

__all__ = ["run_cache_info", "run_mla_cache_info"]

_trees: dict[str, Path] = {}


def _framework(era: str) -> tuple[Any, Any]:
    """cache_info and cache_utils of the embedded target of an era; what another era imported is forgotten."""
    from kvskill.embedded import materialise

    if era not in _trees:
        _trees[era] = materialise(Path(tempfile.mkdtemp(prefix="kvskill-era-")), era, [])
    for name in [n for n in sys.modules if n.split(".")[0] == "executor"]:
        del sys.modules[name]
    sys.path[:] = [str(_trees[era]), *(p for p in sys.path if p not in map(str, _trees.values()))]
    importlib.invalidate_caches()
    base = "executor.core.kv_cache"
    return importlib.import_module(f"{base}.cache_info"), importlib.import_module(f"{base}.cache_utils")


def _era_values(era: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values for entries, values for the info): where block_size stands in the era."""
    on_model = era < "2026-06"
    entry = {"block_size": None if on_model else "infer_config.scheduler_config.block_size"}
    return entry, {"model_block_size": on_model, "entry_block_size": False}


def _infer(block: int) -> Any:
    scheduler = types.SimpleNamespace(block_size=block, batch_size_per_dp_rank=2)
    model = types.SimpleNamespace(next_n=0)
    return types.SimpleNamespace(scheduler_config=scheduler, model_config=model)


def run_cache_info(case: dict[str, Any], place: Any) -> float:
    """framework/cache_entries and get_cache_info: three layers, validated, allocated, injected."""
    info_module, utils = _framework(case["era"])
    entry_values, info_values = _era_values(case["era"])
    windows = [case["window"] if case["sliding"] == "always" or i % 2 == 0 else None for i in range(3)]
    if case["sliding"] == "some":
        more = {"attn_type": '"SlidingWindow" if self.sliding_window else "FullAttention"',
                "window": "self.sliding_window or None"}  # fmt: skip
    elif case["sliding"] == "always":
        more = {"attn_type": '"SlidingWindow"', "window": "self.sliding_window"}
    else:
        more = {}
    scope = {**vars(info_module), "torch": torch, "replace": replace}
    body = textwrap.indent(render_case("framework/cache_entries", case, **entry_values, **more), "    ")
    exec(f"def declare(self, infer_config):\n{body}", scope)
    exec(render_case("framework/get_cache_info", case, **info_values), scope)
    infer = _infer(case["block"])
    layers = []
    for window in windows:
        attention = types.SimpleNamespace(
            head_dim=case["dim"], num_key_value_heads_per_rank=case["kv_heads"], sliding_window=window
        )
        scope["declare"](attention, infer)
        layers.append(types.SimpleNamespace(self_attn=attention))
    model = types.SimpleNamespace(infer_config=infer, model=types.SimpleNamespace(layers=layers))
    info = scope["get_cache_info"](model)
    utils.validate_cache_info(info)
    groups = {"SlidingWindow" if w else "FullAttention" for w in windows}
    utils.allocate_cache_tensors(torch.device("cpu"), info, dict.fromkeys(groups, 5))
    wanted = (5, case["block"], case["kv_heads"], case["dim"])
    for layer in layers:
        k, v = layer.self_attn.k_cache, layer.self_attn.v_cache
        if tuple(k.shape) != wanted or tuple(v.shape) != wanted or k.data_ptr() == v.data_ptr():
            return float("inf")
    entries = [e for layer in info.layer_infos for e in layer.caches]
    good = info.num_layers == 3 and [e.sliding_window for e in entries[::2]] == windows
    return 0.0 if good else float("inf")


def run_mla_cache_info(case: dict[str, Any], place: Any) -> float:
    """framework/mla_cache_info: two layers, or two attention objects in each of two layers."""
    info_module, utils = _framework(case["era"])
    on_model = case["era"] < "2026-06"
    entry_fields = set(info_module.CacheEntry.__dataclass_fields__)
    values: dict[str, Any] = {
        "model_block_size": on_model,
        "entry_block_size": False,
        "mla_backend": "is_mla_backend" in info_module.ModelCacheInfo.__dataclass_fields__,
        "sublayers": ".self_attn" if case["sublayers"] else None,
        "caches": "list(attention.cache_entries)" if case["sublayers"] else "list(layer.self_attn.cache_entries)",
    }
    scope = {**vars(info_module), "torch": torch, "replace": replace}
    exec(render_case("framework/mla_cache_info", case, **values), scope)

    def attention() -> Any:
        made = types.SimpleNamespace()
        made.cache_entries = [
            info_module.CacheEntry(
                cache_name=name,
                attn_type="FullAttention",
                dim=dim,
                num_head=1,
                dtype=torch.bfloat16,
                needs_block=True,
                tensor_setter=lambda tensor, layer=made, name=name: setattr(layer, name, tensor),
                **({"block_size": case["block"]} if "block_size" in entry_fields else {}),
            )
            for name, dim in (("nope_cache", 512), ("rope_cache", 64))
        ]
        return made

    layers = [
        types.SimpleNamespace(self_attn=[attention(), attention()] if case["sublayers"] else attention())
        for _ in range(2)
    ]
    model = types.SimpleNamespace(infer_config=_infer(case["block"]), model=types.SimpleNamespace(layers=layers))
    info = scope["get_cache_info"](model)
    utils.validate_cache_info(info)
    utils.allocate_cache_tensors(torch.device("cpu"), info, {"FullAttention": 5})
    objects = [a for layer in layers for a in (layer.self_attn if case["sublayers"] else [layer.self_attn])]
    shapes = {(tuple(a.nope_cache.shape), tuple(a.rope_cache.shape)) for a in objects}
    wanted = {((5, case["block"], 1, 512), (5, case["block"], 1, 64))}
    indices = [layer.layer_idx for layer in info.layer_infos]
    good = shapes == wanted and indices == list(range(len(objects))) and info.num_layers == len(objects)
    return 0.0 if good else float("inf")
