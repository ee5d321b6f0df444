"""What a model says about its caches."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Callable, List, Optional, Union

import torch


class CacheAllocator(str, Enum):
    """Where a cache lives."""

    HBM = "hbm"
    SWAPPED_MEMORY = "swapped_memory"


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
    allocator: CacheAllocator = CacheAllocator.HBM
    compress_ratio: int = 1
    tensor: Optional[torch.Tensor] = None
    cache_layout: str = "BnBsND"

    @property
    def group_key(self) -> str:
        """Key of block tables and slot mappings."""
        return self.attn_type if self.manager_key is None else self.manager_key

    @property
    def storage_block_size(self) -> int:
        """Rows per block: one row stands for `compress_ratio` tokens."""
        if self.block_size % self.compress_ratio:
            raise ValueError(f"block_size={self.block_size} is no multiple of compress_ratio={self.compress_ratio}")
        return self.block_size // self.compress_ratio

    def cache_dim_numel(self) -> int:
        """Elements per head and token."""
        numel = 1
        for dim in self.dim if isinstance(self.dim, list) else [self.dim]:
            numel *= dim
        return numel


@dataclass
class MambaCacheEntry(CacheEntry):
    """A recurrent state: one tensor of `shape` per request instead of one row per token."""

    attn_type: str = field(default="Mamba", kw_only=True)
    dim: Optional[Union[int, List[int]]] = field(default=None, kw_only=True)
    num_head: Optional[int] = field(default=None, kw_only=True)
    block_size: int = field(default=1, kw_only=True)
    shape: List[int] = field(default_factory=list, kw_only=True)
    next_n: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.attn_type != "Mamba" or self.block_size != 1:
            raise ValueError("a Mamba cache has attn_type 'Mamba' and block_size 1")
        if not self.shape or any(dim <= 0 for dim in self.shape) or self.next_n < 0:
            raise ValueError(f"a Mamba cache needs a positive shape and next_n >= 0, got {self.shape}, {self.next_n}")

    def cache_dim_numel(self) -> int:
        """Elements of one state."""
        return torch.Size(self.shape).numel()


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
