"""What one forward pass knows about its batch: one object for the whole process."""

from dataclasses import dataclass, replace
from typing import Dict, Optional

import torch


@dataclass
class ForwardMetaData:
    """Lengths, mask, block tables and slots of the current step (n requests, T packed tokens).

    `kv_len` in decode is the index of the last new token, not a length. `block_table` and `slot_mapping` are None
    for models without get_cache_info.
    """

    is_prefill: bool = False
    attention_mask: Optional[torch.Tensor] = None
    kv_len: Optional[torch.Tensor] = None
    actual_seq_lengths_kv: Optional[torch.Tensor] = None
    actual_seq_lengths_q: Optional[torch.Tensor] = None
    actual_seq_lengths_cu_kv: Optional[torch.Tensor] = None
    actual_seq_lengths_cu_q: Optional[torch.Tensor] = None
    actual_seq_lengths_cu_list_kv: Optional[list] = None
    actual_seq_lengths_cu_list_q: Optional[list] = None
    actual_seq_lengths_list_kv: Optional[list] = None
    actual_seq_lengths_list_q: Optional[list] = None
    prompt_tokens: int = 0
    block_table: Optional[Dict[str, torch.Tensor]] = None
    slot_mapping: Optional[Dict[str, torch.Tensor]] = None


_forward_metadata = ForwardMetaData()


def get_forward_metadata():
    """The metadata of the current step."""
    return _forward_metadata


def set_forward_metadata(**changes):
    """Replace the named fields; the others keep their values."""
    global _forward_metadata
    _forward_metadata = replace(_forward_metadata, **changes)


def reset_forward_metadata():
    """Back to empty metadata."""
    global _forward_metadata
    _forward_metadata = ForwardMetaData()
