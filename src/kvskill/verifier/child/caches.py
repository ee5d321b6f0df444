"""The paged caches of a started target: who owns which tensor, and what lies in blocks that nobody owns.

Poison: NaN (absorbing, so any read shows) or a large finite number (so the size of a wrong read can be measured)
in the null block before every forward pass, and in every block from the moment it is freed until it is written.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

__all__ = ["CacheTensor", "Caches"]


@dataclass
class CacheTensor:
    """One cache tensor of one layer. `group` is the key of its block manager."""

    layer: int
    name: str
    group: str
    window: int | None
    tensor: Any
    owner: str = ""


class Caches:
    """Collects tensors as the framework injects them, then poisons and permutes the pools."""

    def __init__(self) -> None:
        self.tensors: list[CacheTensor] = []
        self.expected = 0
        self.poison: float | None = None
        self.managers: dict[str, Any] = {}
        self.initial_free: dict[str, int] = {}
        self.permuted = False

    def watch(self, cache_info: Any) -> None:
        """Wrap every entry's setter so that injected tensors are seen."""
        for layer in cache_info.layer_infos:
            for entry in layer.caches:
                if not entry.needs_block:
                    continue
                self.expected += 1
                setter = entry.tensor_setter
                if setter is not None:
                    entry.tensor_setter = self._recording(setter, layer.layer_idx, entry)

    def _recording(self, setter: Any, layer: int, entry: Any) -> Any:
        group = getattr(entry, "group_key", None) or entry.attn_type

        def record(tensor: Any) -> None:
            window = getattr(entry, "sliding_window", None)
            self.tensors.append(CacheTensor(layer, entry.cache_name, group, window, tensor))
            setter(tensor)

        return record

    def attach(self, manager: Any) -> None:
        """Hook the block pools of the target's KV cache manager."""
        for single in manager.single_type_managers:
            key = getattr(single, "manager_key", None) or single.attn_type
            self.managers[key] = single
            self.initial_free[key] = single.get_num_free_blocks()
            pool = single.block_pool
            pool.free_blocks = self._poisoning(pool.free_blocks, key, pool)

    def _poisoning(self, free_blocks: Any, key: str, pool: Any) -> Any:
        def free(blocks: Any) -> Any:
            out = free_blocks(blocks)
            null = pool.get_null_block()
            self._fill(key, [b for b in blocks if b != null])
            return out

        return free

    def permute(self, seed: int) -> None:
        """Shuffle the free lists: a code that assumes block ids in order must not get them."""
        self.permuted = bool(self.managers)
        for key, single in sorted(self.managers.items()):
            queue = getattr(single.block_pool, "_free_block_queue", None)
            if not isinstance(queue, deque):
                self.permuted = False
                continue
            ids = list(queue)
            random.Random(f"{seed}:{key}").shuffle(ids)
            queue.clear()
            queue.extend(ids)

    def start(self, poison: float | None) -> None:
        """Set the poison for the next run and fill every cache with it (None: leave what is there)."""
        self.poison = poison
        if poison is not None:
            for cache in self.tensors:
                cache.tensor.fill_(poison)

    def before_forward(self) -> None:
        """Renew the poison in the null block: idle rows and skipped windows write there."""
        for key, single in self.managers.items():
            self._fill(key, [single.block_pool.get_null_block()])

    def _fill(self, key: str, blocks: list[int]) -> None:
        if self.poison is None or not blocks:
            return
        for cache in self.tensors:
            if cache.group == key:
                cache.tensor[blocks] = self.poison

    def owned(self, key: str, request_id: int) -> list[int]:
        """Physical block ids of a request, by logical block."""
        return list(self.managers[key].req_to_blocks.get(request_id, []))

    def free_now(self) -> dict[str, int]:
        """Free blocks by group."""
        return {key: m.get_num_free_blocks() for key, m in self.managers.items()}
