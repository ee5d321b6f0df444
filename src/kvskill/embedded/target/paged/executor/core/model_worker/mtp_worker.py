"""Drafting: the MTP model guesses next_n tokens that the main model then checks in one step.

Main and draft model share the forward metadata. Per decode step `kv_len` starts at the index of the newest drafted
token; each further draft moves it, the positions, the lengths and the slots by one; the block table stays.
"""

import torch

from executor.core.model_worker.model_worker import ModelWorker
from executor.core.requests import MTPInfo
from executor.utils.forward_metadata import get_forward_metadata, set_forward_metadata


class MTPWorker:
    """Runs the draft model after the main one."""

    def __init__(self, infer_config, device):
        self.infer_config = infer_config
        self.device = device
        self.next_n = infer_config.model_config.next_n
        self.exe_mode = infer_config.model_config.exe_mode
        self.block_size = infer_config.scheduler_config.block_size
        self.batch_size_per_dp_rank = infer_config.scheduler_config.batch_size_per_dp_rank
        self.kvcache_manager = None
        self.engine = None  # set by the engine: lengths and slots are built in one place
        self.mtp_model_worker = ModelWorker(infer_config, device)

    def share_weights_from_main_model(self, main_model):
        """A draft model whose embedding or head is None uses the main model's."""
        draft = self.mtp_model_worker.model
        if getattr(draft, "lm_head", "own") is None:
            draft.lm_head = main_model.lm_head
        if getattr(draft.model, "embed_tokens", "own") is None:
            draft.model.embed_tokens = main_model.model.embed_tokens

    def _positions(self, kv_len):
        back = torch.arange(self.next_n, -1, -1, device=kv_len.device)
        return (kv_len.unsqueeze(1) - back).clamp(min=0).reshape(-1)

    def get_main_model_inputs(self, input_ids, batch):
        """Packed ids and positions of a decode step, and the index of each row's newest token."""
        kv_len = get_forward_metadata().kv_len.to(self.device)
        if batch is not None:
            drafts = batch.mtp_infos.spec_tokens.to(self.device)
            input_ids = torch.cat([input_ids.unsqueeze(1), drafts], dim=1)[:, -(self.next_n + 1) :].reshape(-1)
            # The draft loop moved kv_len on by next_n - 1; the main step starts one after the accepted prefix.
            kv_len = kv_len - (self.next_n - 1) + 1
        return input_ids, kv_len, self._positions(kv_len)

    def inference(self, batch, main_next_tokens, accepted_num, model_inputs_main, prev_hidden_states):
        """Draft next_n tokens into `batch.mtp_infos`; returns seconds."""
        info = batch.mtp_infos = batch.mtp_infos or MTPInfo()
        info.set_mtp_info(accepted_num=accepted_num, is_prefill=batch.is_prefill, spec_tokens=None)
        inputs = self._first_inputs(batch, main_next_tokens, model_inputs_main, prev_hidden_states)
        seconds = 0.0
        for step in range(1 if batch.is_prefill else self.next_n):
            if step:
                inputs = self._next_inputs(inputs, info, hidden, batch)
            (logits, hidden), spent = self.mtp_model_worker.inference(inputs, info.is_prefill, is_mtp=True)
            seconds += spent
            self._keep_draft(logits, info, len(batch.requests))
        return seconds

    def _first_inputs(self, batch, main_next_tokens, main_inputs, hidden):
        inputs = {"position_ids": main_inputs["position_ids"], "forward_metadata": get_forward_metadata()}
        if batch.is_prefill:
            # The draft model sees each prompt shifted by one: its last token is the one just sampled.
            ends = batch.seq_lens.to(self.device).cumsum(0)
            ids = batch.input_ids.to(self.device).roll(-1)
            ids[ends - 1] = main_next_tokens[:, 0]
            inputs["request_offset"] = main_inputs.get("request_offset", 0)
            inputs["forward_metadata"] = main_inputs["forward_metadata"]
            hidden = hidden.reshape(-1, hidden.shape[-1])[: batch.total_tokens]
        else:
            ids = main_next_tokens.reshape(-1).clone()
        return {**inputs, "input_ids": ids.contiguous(), "prev_hidden_states": hidden}

    def _keep_draft(self, logits, info, rows):
        tokens = torch.argmax(logits, dim=-1)
        if info.is_prefill:
            draft = tokens[:, -1:]
            draft = torch.cat([draft, draft.new_zeros(draft.shape[0], self.next_n - 1)], dim=1)
            set_forward_metadata(kv_len=get_forward_metadata().kv_len + 2 * self.next_n - 1, is_prefill=False)
            info.is_prefill = False
        else:
            draft = tokens[:rows].gather(1, info.accepted_num.view(-1, 1).clamp(0, self.next_n))
        info.spec_tokens = draft if info.spec_tokens is None else torch.cat([info.spec_tokens, draft], dim=-1)

    def _next_inputs(self, inputs, info, hidden, batch):
        q_len = self.next_n + 1
        kv_len = get_forward_metadata().kv_len + 1
        position_ids = self._positions(kv_len)
        fields = self.engine.decode_lengths(kv_len, q_len)
        if self.kvcache_manager:
            tables = get_forward_metadata().block_table
            fields["slot_mapping"] = self.engine.slot_mapping(
                position_ids, fields["actual_seq_lengths_cu_q"], tables
            )
        set_forward_metadata(is_prefill=False, **fields)
        ids = inputs["input_ids"].view(-1, q_len)
        ids = torch.cat([ids, ids.new_zeros(ids.shape[0], 1)], dim=1)
        rows = len(batch.requests)
        where = info.accepted_num.view(-1, 1) + 1
        ids[:rows] = ids[:rows].scatter(1, where, info.spec_tokens[:, -1:])
        return {
            "input_ids": ids[:, 1:].reshape(-1).contiguous(),
            "position_ids": position_ids,
            "prev_hidden_states": hidden,
            "forward_metadata": get_forward_metadata(),
        }
