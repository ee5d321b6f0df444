"""The init and release links as named checks: name, whether it holds, one line with the figures."""

from __future__ import annotations

from typing import Any

from kvskill.verifier.child.caches import Caches

__all__ = ["check", "init_link", "release_link"]


def check(result: dict[str, Any], name: str, ok: bool | None, text: str) -> None:
    """Record a named check; `ok` None means that it could not be run."""
    result["checks"].append({"name": name, "ok": ok, "text": text})


def init_link(target: Any, cache_info: Any, caches: Caches, result: dict[str, Any]) -> None:
    """get_cache_info, the target's own validation (it ran while loading), allocation, setters."""
    result["paged"] = cache_info is not None
    if cache_info is None:
        return
    entries = [(layer.layer_idx, e) for layer in cache_info.layer_infos for e in layer.caches]
    groups = sorted({getattr(e, "group_key", None) or e.attn_type for _, e in entries})
    check(
        result,
        "init.cache-info",
        True,
        f"{cache_info.num_layers} layers, {len(entries)} entries, groups {', '.join(groups)}",
    )
    check(result, "init.validate", True, "the target's own validate_cache_info accepts it")
    size = sum(c.tensor.numel() * c.tensor.element_size() for c in caches.tensors)
    shapes = sorted({f"{c.group} {list(c.tensor.shape)}" for c in caches.tensors})
    done = len(caches.tensors) == caches.expected
    check(
        result,
        "init.allocation",
        done,
        f"{len(caches.tensors)} of {caches.expected} tensors, {size} bytes: {'; '.join(shapes)}",
    )
    missing, places = [], {}
    models = [m for m in (target.model, target.mtp_model) if m is not None]
    for cache in caches.tensors:
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                for attribute, value in [*vars(module).items(), *module._buffers.items()]:
                    if value is cache.tensor:
                        cache.owner = f"{'mtp.' if number else ''}{name}.{attribute}"
        if cache.owner:
            places[cache.owner] = cache
        else:
            missing.append(f"layer {cache.layer} {cache.name}")
    text = f"{len(places)} attributes hold the {len(caches.tensors)} tensors"
    if missing:
        text = f"no module attribute holds {', '.join(missing[:4])}"
    elif len(places) != len(caches.tensors):
        text = f"only {len(places)} attributes hold {len(caches.tensors)} tensors: a setter overwrites another's"
    check(result, "init.setters", not missing and len(places) == len(caches.tensors), text)
    pointers: dict[int, list[str]] = {}
    for cache in caches.tensors:
        pointers.setdefault(cache.tensor.data_ptr(), []).append(cache.owner or f"layer {cache.layer} {cache.name}")
    shared = [names for names in pointers.values() if len(names) > 1]
    check(
        result,
        "init.own-storage",
        not shared,
        f"{len(pointers)} storages" if not shared else f"one storage for {' and '.join(shared[0])}",
    )


def release_link(caches: Caches, requests: int, result: dict[str, Any], name: str = "release.blocks") -> None:
    """All blocks back in every pool after `requests` requests."""
    if not caches.managers:
        return
    now = caches.free_now()
    leaked = {k: caches.initial_free[k] - n for k, n in now.items() if n != caches.initial_free[k]}
    text = ", ".join(f"{k} {now[k]}/{caches.initial_free[k]} free" for k in sorted(now))
    check(result, name, not leaked, f"after {requests} requests: {text}")
