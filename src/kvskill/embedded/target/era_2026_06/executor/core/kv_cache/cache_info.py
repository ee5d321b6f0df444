"""What a model says about its caches."""

from dataclasses import dataclass
from typing import Callable, List, Optional, Union

import torch


@dataclass
class CacheEntry:
    """One cache tensor of one layer. Entries with the same group key share block ids.

    `block_size` is required for block-managed entries; `manager_key` separates groups of one attention type;
    `tensor_setter` receives the tensor once it is allocated.
    """

    cache_name: str
    attn_type: str
    dim: Union[int, List[int]]
    num_head: int
    dtype: torch.dtype
    needs_block: bool
    block_size: Optional[int] = None
    manager_key: Optional[str] = None
    tensor_setter: Optional[Callable[[torch.Tensor], None]] = None
    sliding_window: Optional[int] = None
    tensor: Optional[torch.Tensor] = None

    @property
    def group_key(self) -> str:
        """Key of block tables and slot mappings."""
        return self.attn_type if self.manager_key is None else self.manager_key

    def cache_dim_numel(self) -> int:
        """Elements per head and token."""
        numel = 1
        for dim in self.dim if isinstance(self.dim, list) else [self.dim]:
            numel *= dim
        return numel


@dataclass
class LayerCacheInfo:
    """The caches of one layer."""

    layer_idx: int
    caches: List[CacheEntry]


@dataclass
class ModelCacheInfo:
    """The caches of a model. `is_mla_backend` is for latent caches only."""

    num_layers: int
    layer_infos: List[LayerCacheInfo]
    is_mla_backend: bool = False

    def merge(self, other):
        """This model's layers, then the other's with their indices moved up."""
        if self.is_mla_backend != other.is_mla_backend:
            raise ValueError("is_mla_backend differs between the two models")
        for layer in other.layer_infos:
            layer.layer_idx += len(self.layer_infos)
        layers = [*self.layer_infos, *other.layer_infos]
        return ModelCacheInfo(len(layers), layers, self.is_mla_backend)


def group_key(entry):
    """Entries with the same key share block ids."""
    return entry.group_key


def block_size_of(entry, cache_info):
    """Tokens per block of an entry."""
    return entry.block_size
