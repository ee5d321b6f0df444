"""Bytes per rank of the KV caches, Legacy against Paged, as the framework would allocate them.

Legacy: every attention module gets `[batch_size_per_dp_rank, cache_seq_len, *cache_unit]` twice, in the
worker's bfloat16, whatever its window. Paged: one tensor `[blocks, block_size, num_head, dim]` per cache
entry. Alignment padding of the allocator is given apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvskill.analyzer.data import load_yaml
from kvskill.analyzer.memory.formulas import Formulas, block_num
from kvskill.analyzer.yamls import RunSettings
from kvskill.diagnostics import Diagnostic, InputError, Severity, Span
from kvskill.manifest import MemoryPlan

__all__ = ["CacheGeometry", "parse_what_if", "plan_memory", "plan_standalone"]

_WHAT_IF = {
    "batch": "batch_size",
    "len": "input_len",
    "new": "max_new_tokens",
    "tp": "attn_tp_size",
    "block": "block_size",
    "world": "world_size",
    "next_n": "next_n",
}


@dataclass(frozen=True)
class CacheGeometry:
    """One cache entry of `layers` layers. `kv_heads` are those of the model; `split` says that ranks share
    them out.

    `dim` counts elements per head and token, `itemsize` bytes per element. `shape` elements replace heads x
    dim for a recurrent state (Mamba). `mtp` entries exist only when next_n > 0.
    """

    name: str
    group_key: str
    attn_type: str
    layers: int
    kv_heads: int
    dim: int
    itemsize: int = 2
    window: int | None = None
    split: bool = True
    shape: int = 0
    mtp: bool = False

    def heads_per_rank(self, tp: int) -> int:
        """`max(num_kv_heads // attn_tp_size, 1)`, the latent of MLA unsplit."""
        return max(self.kv_heads // tp, 1) if self.split else self.kv_heads

    def token_elems(self, tp: int) -> int:
        """Elements per token and layer on one rank."""
        return self.heads_per_rank(tp) * self.dim


def parse_what_if(text: str, run: RunSettings) -> RunSettings:
    """`batch=8,len=4096,new=512,tp=4,block=128` on top of run settings.

    `tp` alone keeps the number of data-parallel groups (world grows with it). Raises InputError KV008.
    """
    updates: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.replace(";", ",").split(","))):
        name, sign, value = part.partition("=")
        if name.strip() not in _WHAT_IF or not sign or not value.strip().isdigit():
            raise _bad_what_if(f"`{part}` is not understood")
        number = int(value)
        if number < 1 and name.strip() != "next_n":
            raise _bad_what_if(f"`{part}` must be at least 1")
        updates[_WHAT_IF[name.strip()]] = number
    if "attn_tp_size" in updates and "world_size" not in updates:
        groups = max(run.world_size // run.attn_tp_size, 1)
        updates["world_size"] = groups * updates["attn_tp_size"]
    new = replace(run, **updates)  # type: ignore[arg-type]
    if new.world_size % new.attn_tp_size:
        raise _bad_what_if(f"tp={new.attn_tp_size} does not divide world={new.world_size}")
    if new.batch_per_rank < 1:
        raise _bad_what_if(f"batch={new.batch_size} is less than one request per data-parallel rank")
    return new


def plan_memory(caches: Sequence[CacheGeometry], run: RunSettings, formulas: Formulas, yaml: str | None) -> MemoryPlan:
    """The plan of one run. Raises ValueError for geometry that the framework itself rejects."""
    total = formulas.total(run)
    live = [c for c in caches if run.next_n > 0 or not c.mtp]
    blocks: dict[str, int] = {}
    paged = padding = 0
    for cache in live:
        count = block_num(cache.attn_type, run, total_len=total, window=cache.window, partitions=formulas.partitions)
        if blocks.setdefault(cache.group_key, count) != count:
            raise ValueError(f"caches of group {cache.group_key} need different block numbers")
        one = count * (cache.shape or run.block_size * cache.token_elems(run.attn_tp_size)) * cache.itemsize
        paged += cache.layers * one
        if formulas.alignment:
            slack = (formulas.alignment + cache.itemsize - 1) // cache.itemsize * cache.itemsize
            padding += cache.layers * slack
    rows = run.batch_per_rank * formulas.legacy(run)
    per_token = _legacy_elems(live, run.attn_tp_size)
    return MemoryPlan(
        yaml=yaml,
        batch_size=run.batch_size,
        batch_per_rank=run.batch_per_rank,
        input_len=run.input_len,
        max_new_tokens=run.max_new_tokens,
        tp=run.attn_tp_size,
        block_size=run.block_size,
        next_n=run.next_n,
        max_total_len=total,
        legacy_bytes=rows * per_token * int(load_yaml("memory_formulas.yaml")["legacy_itemsize"]),
        paged_bytes=paged,
        padding_bytes=padding,
        blocks=dict(sorted(blocks.items())),
    )


def plan_standalone(caches: Sequence[CacheGeometry], run: RunSettings, yaml: str | None) -> MemoryPlan:
    """The plan of a runner that allocates for itself: every row gets `ceil(length / block_size)` blocks, no null block.

    The length is prompt plus new tokens; a sliding layer keeps its whole length, because the table never changes.
    """
    length = run.input_len + run.max_new_tokens
    rows = run.batch_per_rank
    count = rows * -(-length // run.block_size)
    live = [c for c in caches if run.next_n > 0 or not c.mtp]
    paged = sum(c.layers * count * run.block_size * c.token_elems(run.attn_tp_size) * c.itemsize for c in live)
    legacy = rows * length * _legacy_elems(live, run.attn_tp_size)
    return MemoryPlan(
        yaml=yaml,
        batch_size=run.batch_size,
        batch_per_rank=rows,
        input_len=run.input_len,
        max_new_tokens=run.max_new_tokens,
        tp=run.attn_tp_size,
        block_size=run.block_size,
        next_n=run.next_n,
        max_total_len=length,
        legacy_bytes=legacy * int(load_yaml("memory_formulas.yaml")["legacy_itemsize"]),
        paged_bytes=paged,
        blocks={"runner": count},
    )


def _legacy_elems(caches: Iterable[CacheGeometry], tp: int) -> int:
    """Elements per token over all layers; recurrent states are not part of the Legacy K/V caches."""
    return sum(c.layers * c.token_elems(tp) for c in caches if not c.shape)


def _bad_what_if(fact: str) -> InputError:
    return InputError(
        Diagnostic(
            "KV008",
            Severity.ERROR,
            f"In --what-if, {fact}.",
            f"Give whole numbers for any of {', '.join(_WHAT_IF)}: `--what-if batch=8,len=4096,tp=4`.",
            Span("--what-if"),
        )
    )
