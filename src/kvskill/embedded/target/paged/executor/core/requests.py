"""Requests and the batches made of them."""

from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

from executor.utils.forward_metadata import get_forward_metadata, set_forward_metadata


@dataclass
class GenerationOutput:
    """Text generated for one prompt."""

    prompt: List[dict]
    output_text: str
    finish_reason: str = "length"


@dataclass
class SamplingParams:
    """Limits of one request; decoding is greedy."""

    max_tokens: Optional[int] = None
    ignore_eos: bool = True
    temperature: float = 0.0


@dataclass
class MTPInfo:
    """Speculation state of a request or batch: drafted tokens and how many the main model accepted."""

    is_prefill: bool = False
    spec_tokens: Optional[torch.Tensor] = None
    accepted_num: Optional[torch.Tensor] = None

    def set_mtp_info(self, **values):
        """Set the attributes that exist; others are ignored."""
        for name, value in values.items():
            if hasattr(self, name):
                setattr(self, name, value)


@dataclass
class Request:
    """One prompt on its way. `computed_len`: index of the last token whose K/V are in the cache."""

    request_id: int
    prompt: object
    input_ids: torch.Tensor = field(default_factory=lambda: torch.tensor([]))
    computed_len: int = 0
    prompt_tokens: int = 0
    output_id_list: List[int] = field(default_factory=list)
    is_prefill_done: bool = False
    is_finished: bool = False
    finish_reason: Optional[str] = None
    mtp_info: Optional[MTPInfo] = None
    spec_num_forward_ct: int = 0
    spec_num_accepted_tokens: int = 0
    infer_time: List[float] = field(default_factory=list)
    decode_step_count: int = 0
    stop_valid_generation: bool = False
    valid_output_len: Optional[int] = None
    sampling_params: Optional[SamplingParams] = None

    def prompt_ids(self):
        """The prompt without padding."""
        return self.input_ids[: self.prompt_tokens or self.input_ids.numel()]

    def get_all_token_ids(self):
        return [*self.prompt_ids().long().tolist(), *self.output_id_list]

    def get_last_token_id(self):
        ids = self.output_id_list or self.prompt_ids().long().tolist()
        return ids[-1] if ids else None

    def get_seq_len(self):
        return self.prompt_ids().numel() + len(self.output_id_list)

    def update_mtp_info(self, accepted_num, spec_tokens):
        """Remember the draft for the next step and count what was accepted."""
        self.mtp_info = self.mtp_info or MTPInfo()
        self.mtp_info.set_mtp_info(spec_tokens=spec_tokens)
        if not self.stop_valid_generation:
            self.spec_num_forward_ct += 1
            self.spec_num_accepted_tokens += int(accepted_num)


@dataclass
class Batch:
    """Requests that run together. Prefill packs prompts into one token stream; decode sends one token per row."""

    requests: List[Request] = field(default_factory=list)
    is_prefill: bool = True
    input_ids: Optional[torch.Tensor] = None
    position_ids: Optional[torch.Tensor] = None
    seq_lens: Optional[torch.Tensor] = None
    total_tokens: int = 0
    request_offset: int = 0
    request_indices: Dict[int, int] = field(default_factory=dict)
    mtp_infos: Optional[MTPInfo] = None
    is_dummy: bool = False

    def __len__(self):
        return len(self.requests)

    def is_empty(self):
        return not self.requests

    def get_max_seq_len(self):
        return max((request.get_seq_len() for request in self.requests), default=0)

    def build_tensors_from_requests(self):
        """Fill the tensors of this step; in decode also `kv_len` of the forward metadata."""
        if self.is_prefill:
            prompts = [request.prompt_ids() for request in self.requests]
            self.seq_lens = torch.tensor([prompt.numel() for prompt in prompts], dtype=torch.long)
            self.total_tokens = int(self.seq_lens.sum())
            self.input_ids = torch.cat(prompts)
            return
        self.input_ids = torch.tensor([request.get_last_token_id() for request in self.requests], dtype=torch.long)
        set_forward_metadata(kv_len=torch.tensor([request.computed_len for request in self.requests]))
        drafts = [request.mtp_info for request in self.requests]
        self.mtp_infos = None if None in drafts else MTPInfo(spec_tokens=torch.stack([d.spec_tokens for d in drafts]))

    def update_requests_from_batch(self, is_prefill, next_tokens, infer_time):
        """Give every request its new tokens and its new computed length; returns {request_id: tokens}."""
        rows = get_forward_metadata().kv_len
        for name, value in (("next_tokens", next_tokens), ("kv_len", rows)):
            if value is not None and value.shape[0] != len(self.requests):
                raise ValueError(f"{name} has {value.shape[0]} rows for {len(self.requests)} requests")
        produced = {}
        for row, request in enumerate(self.requests):
            accepted = self._accepted(row, request)
            if next_tokens is not None:
                tokens = next_tokens[row] if accepted is None else next_tokens[row, : accepted + 1]
                produced[request.request_id] = tokens.tolist()
                request.output_id_list += produced[request.request_id]
            if rows is not None:
                request.computed_len = int(rows[row]) + (accepted or 0)
            if infer_time is not None:
                request.infer_time.append(infer_time)
        return produced

    def _accepted(self, row, request):
        info = self.mtp_infos
        if info is None or info.accepted_num is None:
            return None
        accepted = int(info.accepted_num[row])
        request.update_mtp_info(accepted, info.spec_tokens[row])
        return accepted


@dataclass
class StepOutput:
    """What one scheduler step produced."""

    next_tokens: Dict[int, List[int]] = field(default_factory=dict)
    finished_requests: List[int] = field(default_factory=list)
