"""A small block manager for template cases: permuted block ids, a null block, windows that give blocks back.

Block 0 is the null block. Blocks that nobody owns hold NaN, so that a wrong read shows.
"""

from __future__ import annotations

import random
import types
from typing import Any

import torch

__all__ = ["Blocks", "metadata"]


class Blocks:
    """Tables of the rows of one batch. `window` None: nothing is given back."""

    def __init__(self, rows: int, longest: int, size: int, window: int | None, seed: str) -> None:
        self.size, self.window = size, window
        self.width = -(-longest // size)
        self.count = rows * self.width + 1
        ids = list(range(1, self.count))
        random.Random(seed).shuffle(ids)
        self.free = ids
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.caches: list[Any] = []

    def cache(self, heads: int, dim: int, dtype: Any, device: Any) -> Any:
        """A cache [blocks, size, heads, dim] full of NaN."""
        tensor = torch.full((self.count, self.size, heads, dim), float("nan"), dtype=dtype, device=device)
        self.caches.append(tensor)
        return tensor

    def grow(self, row: int, tokens: int, computed: int) -> None:
        """Make room for `tokens` tokens; `computed` are in the cache already. Blocks left of the window go back."""
        table = self.tables[row]
        needed = -(-tokens // self.size)
        first = 0
        if self.window is not None:
            first = max(0, (tokens if not table else computed + 1) - self.window) // self.size
        for block in range(len(table)):
            if block < first and table[block] != 0:
                self._give_back(table[block])
                table[block] = 0
        while len(table) < needed:
            table.append(0 if len(table) < first else self.free.pop(0))

    def _give_back(self, block: int) -> None:
        self.free.append(block)
        for cache in self.caches:
            cache[block] = float("nan")

    def slots(self, row: int, positions: list[int]) -> list[int]:
        """Slots of positions."""
        return [self.tables[row][p // self.size] * self.size + p % self.size for p in positions]

    def table(self, device: Any) -> Any:
        """[rows, width] int32; the tail is the null block."""
        padded = [t + [0] * (self.width - len(t)) for t in self.tables]
        return torch.tensor(padded, dtype=torch.int32, device=device)


def metadata(
    is_prefill: bool, queries: list[int], keys: list[int], slots: list[int], table: Any, host: bool, device: Any
) -> Any:
    """What the framework's engine passes for one step; `queries` and `keys` by row."""
    q = torch.tensor(queries, device=device)
    kv = torch.tensor(keys, device=device)
    lists = host and not is_prefill
    return types.SimpleNamespace(
        is_prefill=is_prefill,
        attention_mask=~torch.tril(torch.ones((2048, 2048), dtype=torch.bool, device=device)),
        actual_seq_lengths_q=q,
        actual_seq_lengths_kv=kv,
        actual_seq_lengths_cu_q=q.cumsum(0),
        actual_seq_lengths_cu_kv=kv.cumsum(0),
        actual_seq_lengths_list_q=queries if lists else None,
        actual_seq_lengths_list_kv=keys if lists else None,
        actual_seq_lengths_cu_list_q=q.cumsum(0).tolist() if lists else None,
        actual_seq_lengths_cu_list_kv=kv.cumsum(0).tolist() if lists else None,
        prompt_tokens=sum(queries) if is_prefill else 0,
        block_table={"FullAttention": table},
        slot_mapping={"FullAttention": torch.tensor(slots, dtype=torch.int64, device=device)},
    )
