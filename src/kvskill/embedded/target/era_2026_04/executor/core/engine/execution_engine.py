"""The engine: groups first, then models, then caches."""

from transformers import AutoTokenizer

from executor.core.config import CommManager
from executor.core.engine.stepping import SteppingEngine
from executor.core.kv_cache.cache_utils import prepare_block_tables, prepare_slot_mapping


class ExecutionEngine(SteppingEngine):
    """Communication groups exist before the model is built."""

    def __init__(self, infer_config, is_online=False):
        super().__init__(infer_config, is_online)
        self.comm_manager = CommManager(infer_config.parallel_config)
        self.comm_manager.initialize()

    def load_model(self, config_cls, main_model_cls, mtp_model_cls=None):
        """Load the main model and, with next_n > 0, the draft model; then allocate their caches."""
        self.main_worker.load_model(main_model_cls, config_cls, self.comm_manager)
        if self.mtp_worker is not None:
            if mtp_model_cls is None:
                raise ValueError("next_n > 0 needs a draft model; this model has none, set next_n to 0")
            self.mtp_worker.mtp_model_worker.load_model(mtp_model_cls, config_cls, self.comm_manager)
            self.mtp_worker.share_weights_from_main_model(self.main_worker.model)
        self.hf_config = self.main_worker.hf_config
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.infer_config.model_config.model_path, padding_side="right", truncation_side="right"
        )
        self.init_caches()

    def decode_kv_len(self, kv_len):
        return self._pad_batch(kv_len) + 1  # an idle row looks like a request with one token

    def block_tables(self, requests, rows, is_prefill):
        return prepare_block_tables(requests, self.kvcache_manager, self.block_table_max_len, self.device, rows)

    def slot_mapping(self, position_ids, cu_q, tables):
        return prepare_slot_mapping(position_ids, cu_q, tables, self.block_size)
