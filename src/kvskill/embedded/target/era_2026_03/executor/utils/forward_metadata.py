"""What one forward pass knows about its batch: one object for the whole process."""

from dataclasses import dataclass, replace
from typing import Optional

import torch


@dataclass
class ForwardMetaData:
    """Mask and lengths of the current step. `kv_len`: where each row writes its first token of this step."""

    is_prefill: bool = False
    attention_mask: Optional[torch.Tensor] = None
    kv_len: Optional[torch.Tensor] = None
    actual_seq_lengths_kv: Optional[torch.Tensor] = None
    actual_seq_lengths_q: Optional[torch.Tensor] = None


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
