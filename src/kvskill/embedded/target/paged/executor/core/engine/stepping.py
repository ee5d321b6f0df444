"""From a batch to the inputs of one forward pass, and from logits back to requests."""

import torch

from executor.core.kv_cache import KVCacheManager, create_single_type_managers
from executor.core.kv_cache.cache_utils import allocate_cache_tensors, calculate_block_num, validate_cache_info
from executor.core.model_worker import ModelWorker, MTPWorker
from executor.utils.common_utils import ceil_div
from executor.utils.forward_metadata import get_forward_metadata, set_forward_metadata


class SteppingEngine:
    """The part of the engine that every API version shares.

    A subclass builds groups and models (`load_model` or `init`), block tables (`block_tables`, `slot_mapping`),
    and says how idle decode rows look (`decode_kv_len`).
    """

    def __init__(self, infer_config, is_online=False):
        self.infer_config = infer_config
        self.is_online = is_online
        self.tokenizer = self.hf_config = self.kvcache_manager = self.comm_manager = None
        scheduler = infer_config.scheduler_config
        self.max_new_tokens = scheduler.max_new_tokens
        self.block_size = scheduler.block_size
        self.input_truncated_len = infer_config.data_config.input_truncated_len
        self.next_n = infer_config.model_config.next_n
        self.exe_mode = infer_config.model_config.exe_mode
        self.max_total_len = self.longest_sequence()
        self.block_table_max_len = ceil_div(self.max_total_len, self.block_size)
        self.local_rank = infer_config.parallel_config.local_rank
        self.global_rank = infer_config.parallel_config.global_rank
        self.world_size = infer_config.parallel_config.world_size
        self.init_device()
        self.main_worker = ModelWorker(infer_config, self.device)
        self.mtp_worker = MTPWorker(infer_config, self.device) if self.next_n > 0 else None
        if self.mtp_worker is not None:
            self.mtp_worker.engine = self

    def longest_sequence(self):
        """Tokens a request may reach; offline, drafted tokens take room too."""
        if self.is_online:
            return self.infer_config.scheduler_config.max_prefill_tokens + self.max_new_tokens
        return self.input_truncated_len + self.max_new_tokens * (self.next_n + 1) + self.next_n

    def init_device(self):
        self.device = torch.device(f"npu:{self.local_rank}")
        torch.npu.set_device(self.device)
        if self.world_size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="hccl", world_size=self.world_size, rank=self.global_rank)

    @property
    def model(self):
        return self.main_worker.model

    @property
    def mtp_model(self):
        return self.mtp_worker.mtp_model_worker.model if self.mtp_worker else None

    def init_caches(self):
        """Paged when the model describes its caches, Legacy otherwise."""
        workers = [self.main_worker]
        if self.mtp_worker is not None:
            workers.append(self.mtp_worker.mtp_model_worker)
        infos = [worker.get_cache_info() for worker in workers]
        if infos[0] is None:
            for worker in workers:
                worker.init_kvcache()
            return
        info = infos[0]
        if infos[-1] is not None and len(infos) == 2:
            info = info.merge(infos[1])
        self._init_cache_manager(info)

    def _init_cache_manager(self, cache_info):
        validate_cache_info(cache_info)
        counts = calculate_block_num(
            infer_config=self.infer_config,
            cache_info=cache_info,
            offline_max_len=None if self.is_online else self.max_total_len,
            tp_group=self.comm_manager.get_group("attn_tp_group"),
        )
        allocate_cache_tensors(device=self.device, cache_info=cache_info, block_num_by_type=counts)
        managers = create_single_type_managers(
            cache_info=cache_info, block_num_by_type=counts, max_model_len=self.max_total_len
        )
        self.kvcache_manager = self.make_manager(managers, cache_info)
        if self.mtp_worker is not None:
            self.mtp_worker.kvcache_manager = self.kvcache_manager

    def make_manager(self, managers, cache_info):
        return KVCacheManager(max_model_len=self.max_total_len, single_type_managers=managers)

    def _pad_batch(self, tensor, pad_value=0, per_row=1):
        """Fill up with idle rows to the configured batch; a row has `per_row` elements."""
        missing = self.infer_config.scheduler_config.batch_size_per_dp_rank * per_row - tensor.shape[0]
        if missing <= 0:
            return tensor
        return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), pad_value)])

    def _build_model_inputs(self, input_ids, is_prefill, seq_lens=None, batch=None, request_offset=0):
        """Keyword arguments of forward; the global forward metadata describes the same step."""
        if is_prefill:
            position_ids, fields = self._prefill_fields(seq_lens, request_offset)
        else:
            input_ids, position_ids, fields = self._decode_fields(input_ids, batch)
        tables = slots = None
        if self.kvcache_manager:
            cu_q = fields["actual_seq_lengths_cu_q"]
            tables = self.block_tables(batch.requests if batch else None, cu_q.shape[0], is_prefill)
            slots = self.slot_mapping(position_ids, cu_q, tables)
        ones = torch.ones((2048, 2048), dtype=torch.bool, device=self.device)
        set_forward_metadata(
            is_prefill=is_prefill,
            attention_mask=torch.triu(ones, diagonal=1),
            block_table=tables,
            slot_mapping=slots,
            **fields,
        )
        inputs = {
            "input_ids": input_ids.contiguous(),
            "position_ids": position_ids,
            "forward_metadata": get_forward_metadata(),
        }
        if is_prefill and not self.kvcache_manager:
            inputs["request_offset"] = request_offset
        return inputs

    def _prefill_fields(self, seq_lens, request_offset):
        lengths = seq_lens.to(self.device)
        ranges = [torch.arange(length, device=self.device) for length in lengths.tolist()]
        row = self.input_truncated_len + self.max_new_tokens  # tokens per row of a Legacy cache
        legacy = [r + (request_offset + i) * row for i, r in enumerate(ranges)]
        cu = lengths.cumsum(0)
        return torch.cat(ranges), {
            "kv_len": torch.cat(legacy),
            "actual_seq_lengths_kv": lengths,
            "actual_seq_lengths_q": lengths.clone(),
            "actual_seq_lengths_cu_kv": cu,
            "actual_seq_lengths_cu_q": cu.clone(),
            "actual_seq_lengths_cu_list_kv": None,
            "actual_seq_lengths_cu_list_q": None,
            "actual_seq_lengths_list_kv": None,
            "actual_seq_lengths_list_q": None,
            "prompt_tokens": int(lengths.sum()),
        }

    def _decode_fields(self, input_ids, batch):
        per_row = self.next_n + 1
        if self.mtp_worker:
            input_ids, kv_len, position_ids = self.mtp_worker.get_main_model_inputs(input_ids, batch)
            kv_len = self._pad_batch(kv_len)
            position_ids = self._pad_batch(position_ids, per_row=per_row)
        else:
            kv_len = self.decode_kv_len(get_forward_metadata().kv_len.to(self.device))
            position_ids = kv_len.clone()
        input_ids = self._pad_batch(input_ids, per_row=per_row)
        return input_ids, position_ids, self.decode_lengths(kv_len, per_row)

    def decode_lengths(self, kv_len, per_row):
        """Length fields of a decode step; host lists only where graphs need them."""
        q = torch.full_like(kv_len, per_row)
        tensors = {"kv": kv_len + 1, "q": q, "cu_kv": (kv_len + 1).cumsum(0), "cu_q": q.cumsum(0)}
        lists = self.exe_mode == "npugraph_ex"
        fields = {f"actual_seq_lengths_{name}": value for name, value in tensors.items()}
        for name, value in tensors.items():
            kind = f"cu_list_{name[3:]}" if name.startswith("cu_") else f"list_{name}"
            fields[f"actual_seq_lengths_{kind}"] = value.tolist() if lists else None
        return {"kv_len": kv_len, "prompt_tokens": 0, **fields}

    def _get_warmup_shape(self):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        length, budget = self.input_truncated_len, self.infer_config.scheduler_config.max_prefill_tokens
        if budget > 0:
            length = min(length, budget)
            return max(1, budget // length), rows, length
        return rows, rows, length

    def warmup_tokens(self, count):
        return torch.zeros(count, dtype=torch.long, device=self.device)

    def warm_up(self):
        """One prefill and one decode without requests: every write goes to the null block."""
        prompts, rows, length = self._get_warmup_shape()
        lengths = torch.full((prompts,), length, dtype=torch.long, device=self.device)
        self._warm(self._build_model_inputs(self.warmup_tokens(prompts * length), True, seq_lens=lengths), True)
        set_forward_metadata(kv_len=torch.full((rows,), length - 1, dtype=torch.long, device=self.device))
        inputs = self._build_model_inputs(self.warmup_tokens(rows * (self.next_n + 1)), False)
        if self.exe_mode != "eager":
            self.main_worker.compile_model()
        self._warm(inputs, False)

    def _warm(self, inputs, is_prefill):
        output, _ = self.main_worker.inference(inputs, is_prefill=is_prefill)
        if self.mtp_worker:
            inputs["prev_hidden_states"] = output[1]
            self.mtp_worker.mtp_model_worker.inference(inputs, is_prefill=is_prefill, is_mtp=True)

    def forward_batch(self, batch):
        """Run one batch. Returns {"next_tokens": {request_id: [tokens]}, "logits": [rows, q, vocab]}."""
        batch.build_tensors_from_requests()
        lengths = batch.seq_lens.to(self.device) if batch.seq_lens is not None else None
        inputs = self._build_model_inputs(
            batch.input_ids.to(self.device), batch.is_prefill, lengths, batch, batch.request_offset
        )
        output, seconds = self.main_worker.inference(inputs, is_prefill=batch.is_prefill)
        logits, hidden = output if isinstance(output, tuple) else (output, None)
        if batch.is_prefill:
            set_forward_metadata(kv_len=lengths - 1)
        next_tokens = self._sample_tokens(batch, logits)
        if self.mtp_worker:
            accepted = self.verify_spec_tokens(batch, next_tokens)
            seconds += self.mtp_worker.inference(batch, next_tokens, accepted, inputs, hidden)
        count = len(batch.requests)
        kv_len = get_forward_metadata().kv_len
        if kv_len is not None:
            set_forward_metadata(kv_len=kv_len[:count])
        produced = batch.update_requests_from_batch(batch.is_prefill, next_tokens[:count], seconds)
        return {"next_tokens": produced, "logits": logits, "inference_time": seconds}

    def _sample_tokens(self, batch, logits):
        """Greedy; prefill looks at the last position only."""
        return torch.argmax(logits[:, -1:, :] if batch.is_prefill else logits, dim=-1).to(self.device)

    def verify_spec_tokens(self, batch, main_next_tokens):
        """How many drafted tokens the main model confirms, per request."""
        rows = len(batch.requests)
        if batch.is_prefill:
            return torch.zeros(rows, dtype=torch.long, device=self.device)
        same = batch.mtp_infos.spec_tokens.to(self.device) == main_next_tokens[:rows, : self.next_n]
        return same.long().cumprod(dim=-1).sum(dim=-1)
