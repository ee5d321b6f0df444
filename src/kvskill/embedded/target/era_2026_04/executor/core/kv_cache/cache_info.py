"""What a model says about its caches."""

from dataclasses import dataclass
from typing import Callable, List, Optional, Union

import torch


@dataclass
class CacheEntry:
    """One cache tensor of one layer. `tensor_setter` receives the tensor once it is allocated."""

    cache_name: str
    attn_type: str
    dim: Union[int, List[int]]
    num_head: int
    dtype: torch.dtype
    needs_block: bool
    tensor_setter: Optional[Callable[[torch.Tensor], None]] = None
    sliding_window: Optional[int] = None


@dataclass
class LayerCacheInfo:
    """The caches of one layer."""

    layer_idx: int
    caches: List[CacheEntry]


@dataclass
class ModelCacheInfo:
    """The caches of a model. One block size serves all of them."""

    num_layers: int
    block_size: int
    layer_infos: List[LayerCacheInfo]

    def merge(self, other):
        """This model's layers, then the other's with their indices moved up."""
        if self.block_size != other.block_size:
            raise ValueError(f"block sizes differ: {self.block_size} and {other.block_size}")
        for offset, layer in enumerate(other.layer_infos, start=len(self.layer_infos)):
            layer.layer_idx = offset
        layers = [*self.layer_infos, *other.layer_infos]
        return ModelCacheInfo(num_layers=len(layers), block_size=self.block_size, layer_infos=layers)


def group_key(entry):
    """Entries with the same key share block ids."""
    return entry.attn_type


def block_size_of(entry, cache_info):
    """Tokens per block of an entry."""
    return cache_info.block_size
