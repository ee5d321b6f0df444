"""The engine: models register their groups, then the caches are built."""

import torch

from executor.core.engine.stepping import SteppingEngine
from executor.core.kv_cache import KVCacheManager
from executor.core.kv_cache.cache_utils import prepare_block_tables, prepare_slot_mapping
from executor.core.tokenizer_registry import get_tokenizer
from executor.utils.forward_metadata import set_forward_metadata


class ExecutionEngine(SteppingEngine):
    """A group that no model registered does not exist, `attn_tp_group` included."""

    def __init__(self, infer_config):
        online = infer_config.disagg_config.disaggregation_mode in ("PREFILL", "DECODE")
        super().__init__(infer_config, online)
        self.eos_token_ids = set()

    def init(self, config_cls, main_model_cls, mtp_model_cls=None):
        """Load the main model and, with next_n > 0, the draft model; then allocate their caches."""
        self.main_worker.init(main_model_cls, config_cls)
        self.comm_manager = self.main_worker.comm_manager
        if self.mtp_worker is not None:
            if mtp_model_cls is None:
                raise ValueError("next_n > 0 needs a draft model; this model has none, set next_n to 0")
            self.mtp_worker.mtp_model_worker.init(mtp_model_cls, config_cls, comm_manager=self.comm_manager)
            self.mtp_worker.share_weights_from_main_model(self.main_worker.model)
        self.hf_config = self.main_worker.hf_config
        model = self.infer_config.model_config
        self.tokenizer = get_tokenizer(
            model.model_name, model.model_path, padding_side="right", truncation_side="right"
        )
        self.init_caches()

    def _init_cache_manager(self, cache_info):
        for layer in cache_info.layer_infos:
            for entry in layer.caches:
                if entry.needs_block and entry.attn_type == "Mamba" and entry.next_n != self.next_n:
                    raise ValueError(f"cache {entry.cache_name}: next_n={entry.next_n}, the engine has {self.next_n}")
        super()._init_cache_manager(cache_info)

    def make_manager(self, managers, cache_info):
        return KVCacheManager(
            max_model_len=self.max_total_len, single_type_managers=managers, cache_info=cache_info
        )

    def decode_kv_len(self, kv_len):
        return self._pad_batch(kv_len + 1)  # an idle row has kv_len 0 and writes into the null block

    def warmup_tokens(self, count):
        return torch.randint(0, self.hf_config.vocab_size, (count,), dtype=torch.long, device=self.device)

    def warm_up(self):
        set_forward_metadata(is_warm_up=True)
        super().warm_up()
        set_forward_metadata(is_warm_up=False)

    def block_tables(self, requests, rows, is_prefill):
        widths = self.kvcache_manager.get_block_table_max_lens(self.max_total_len)
        return prepare_block_tables(
            requests, self.kvcache_manager, widths, device=self.device, batch_size=rows, is_prefill=is_prefill
        )

    def slot_mapping(self, position_ids, cu_q, tables):
        return prepare_slot_mapping(position_ids, cu_q, self.kvcache_manager, tables)
