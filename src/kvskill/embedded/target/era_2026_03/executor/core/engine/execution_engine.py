"""The engine: padded 2-D batches, Legacy caches."""

import torch
from transformers import AutoTokenizer

from executor.core.config import CommManager
from executor.core.model_worker import ModelWorker
from executor.utils.forward_metadata import get_forward_metadata, set_forward_metadata


class ExecutionEngine:
    """Runs prefill on [B, S] right-padded prompts and decode on [B, 1]."""

    def __init__(self, infer_config):
        self.infer_config = infer_config
        self.tokenizer = self.hf_config = None
        self.max_new_tokens = infer_config.scheduler_config.max_new_tokens
        self.prefill_mini_batch = infer_config.scheduler_config.prefill_mini_batch
        self.next_n = infer_config.model_config.next_n
        if self.next_n:
            raise ValueError("this example framework has no speculation in this API version")
        self.exe_mode = infer_config.model_config.exe_mode
        parallel = infer_config.parallel_config
        self.local_rank, self.global_rank = parallel.local_rank, parallel.global_rank
        self.world_size = parallel.world_size
        self.device = torch.device(f"npu:{self.local_rank}")
        torch.npu.set_device(self.device)
        if self.world_size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="hccl", world_size=self.world_size, rank=self.global_rank)
        self.comm_manager = CommManager(parallel)
        self.comm_manager.initialize()
        self.main_worker = ModelWorker(infer_config, self.device)
        self.mtp_worker = None

    def load_model(self, config_cls, main_model_cls, mtp_model_cls=None):
        """Load the model and allocate its cache."""
        self.main_worker.load_model(main_model_cls, config_cls, self.comm_manager)
        self.hf_config = self.main_worker.hf_config
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.infer_config.model_config.model_path, padding_side="right", truncation_side="right"
        )

    @property
    def model(self):
        return self.main_worker.model

    @property
    def mtp_model(self):
        return None

    def _build_model_inputs(self, input_ids, is_prefill, batch=None, cycle_idx=0):
        """Keyword arguments of forward; the global forward metadata describes the same step."""
        rows, length = input_ids.shape
        if is_prefill:
            real = input_ids != self.tokenizer.pad_token_id
            position_ids = (real.long().cumsum(-1) - 1).masked_fill(~real, 1)
            kv_len = torch.zeros(rows, dtype=torch.long, device=self.device)
            kv_lengths = torch.full((rows,), length, dtype=torch.long, device=self.device)
            if self.infer_config.model_config.packed_sequence:
                kv_lengths = kv_lengths.cumsum(0)
        else:
            kv_len = get_forward_metadata().kv_len.to(self.device) + 1
            position_ids = kv_len.view(-1, length)
            kv_lengths = kv_len + 1
        q_lengths = torch.arange(1, rows + 1, dtype=torch.long, device=self.device) * length
        if not is_prefill and self.exe_mode == "npugraph_ex":
            kv_lengths, q_lengths = kv_lengths.tolist(), q_lengths.tolist()
        ones = torch.ones((2048, 2048), dtype=torch.bool, device=self.device)
        set_forward_metadata(
            is_prefill=is_prefill,
            kv_len=kv_len,
            actual_seq_lengths_kv=kv_lengths,
            actual_seq_lengths_q=q_lengths,
            attention_mask=torch.triu(ones, diagonal=1),
        )
        inputs = {
            "input_ids": input_ids.contiguous(),
            "position_ids": position_ids,
            "forward_metadata": get_forward_metadata(),
        }
        if is_prefill:
            inputs["cycle_idx"] = cycle_idx
        return inputs

    def warm_up(self):
        """One prefill and one decode on dummy tokens."""
        scheduler = self.infer_config.scheduler_config
        shape = (self.prefill_mini_batch, scheduler.input_max_len)
        inputs = self._build_model_inputs(torch.zeros(shape, dtype=torch.long, device=self.device), True)
        self.main_worker.inference(inputs, is_prefill=True)
        rows = scheduler.batch_size_per_dp_rank
        set_forward_metadata(kv_len=torch.full((rows,), int(inputs["position_ids"][0].max()), device=self.device))
        inputs = self._build_model_inputs(torch.zeros((rows, 1), dtype=torch.long, device=self.device), False)
        if self.exe_mode != "eager":
            self.main_worker.compile_model()
        self.main_worker.inference(inputs, is_prefill=False)

    def forward_batch(self, batch):
        """Run one batch. Returns {"next_tokens": {request_id: [token]}, "logits": [rows, S or 1, vocab]}."""
        batch.build_tensors_from_requests()
        batch.input_ids = batch.input_ids.to(self.device)
        inputs = self._build_model_inputs(batch.input_ids, batch.is_prefill, batch, batch.cycle_idx)
        output, seconds = self.main_worker.inference(inputs, is_prefill=batch.is_prefill)
        logits = output[0] if isinstance(output, tuple) else output  # (logits, hidden states for a draft model)
        if batch.is_prefill:
            set_forward_metadata(kv_len=inputs["position_ids"].amax(dim=1))
        next_tokens = self._sample_tokens(batch, logits)
        return {"next_tokens": batch.update_requests_from_batch(next_tokens, seconds), "logits": logits}

    def _sample_tokens(self, batch, logits):
        """Greedy; prefill looks at the last position only."""
        return torch.argmax(logits[:, -1:, :] if batch.is_prefill else logits, dim=-1).to(self.device)
