"""Requests and the batches made of them: prompts of a batch are padded to one length."""

from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

from executor.utils.forward_metadata import get_forward_metadata, set_forward_metadata


@dataclass
class GenerationOutput:
    """Text generated for one prompt."""

    prompt: str
    output_text: str
    finish_reason: str = "length"


@dataclass
class Request:
    """One prompt on its way. `input_ids` is padded on the right; `kv_len` is the index of the last cached token."""

    request_id: int
    prompt: str
    input_ids: torch.Tensor = field(default_factory=lambda: torch.tensor([]))
    kv_len: int = 0
    output_id_list: List[int] = field(default_factory=list)
    is_prefill_done: bool = False
    is_finished: bool = False
    finish_reason: Optional[str] = None
    infer_time: List[float] = field(default_factory=list)
    decode_step_count: int = 0

    def get_last_token_id(self):
        ids = self.output_id_list or self.input_ids.tolist()
        return ids[-1] if ids else None


@dataclass
class Batch:
    """Requests that run together: input_ids [B, S] in prefill, [B, 1] in decode."""

    requests: List[Request] = field(default_factory=list)
    is_prefill: bool = True
    input_ids: Optional[torch.Tensor] = None
    position_ids: Optional[torch.Tensor] = None
    seq_lens: Optional[torch.Tensor] = None
    cycle_idx: int = 0
    request_indices: Dict[int, int] = field(default_factory=dict)

    def __len__(self):
        return len(self.requests)

    def is_empty(self):
        return not self.requests

    def build_tensors_from_requests(self):
        """Fill the tensors of this step; in decode also `kv_len` of the forward metadata."""
        if self.is_prefill:
            self.input_ids = torch.stack([request.input_ids for request in self.requests])
            return
        self.input_ids = torch.tensor([[request.get_last_token_id()] for request in self.requests])
        set_forward_metadata(kv_len=torch.tensor([int(request.kv_len) for request in self.requests]))

    def update_requests_from_batch(self, next_tokens, infer_time):
        """Give every request its new token and its new kv_len; returns {request_id: tokens}."""
        kv_len = get_forward_metadata().kv_len
        if next_tokens.shape[0] != len(self.requests) or kv_len.shape[0] != len(self.requests):
            raise ValueError(f"{len(self.requests)} requests, {next_tokens.shape[0]} rows of tokens")
        produced = {}
        for row, request in enumerate(self.requests):
            produced[request.request_id] = next_tokens[row].tolist()
            request.output_id_list += produced[request.request_id]
            request.kv_len = kv_len[row]
            request.infer_time.append(infer_time)
        return produced


@dataclass
class StepOutput:
    """What one scheduler step produced."""

    next_tokens: Dict[int, List[int]] = field(default_factory=dict)
    finished_requests: List[int] = field(default_factory=list)
