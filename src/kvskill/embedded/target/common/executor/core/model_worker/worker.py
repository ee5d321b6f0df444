"""One model: its weights, its Legacy cache, its forward pass."""

import time

import torch
import torch_npu  # noqa: F401  (registers the device operators)

from executor.model_loader.default_loader import DefaultModelLoader
from executor.model_loader.dummy_loader import DummyModelLoader


class Worker:
    """What every API version shares; subclasses say when the communication groups appear."""

    def __init__(self, infer_config, device):
        self.infer_config = infer_config
        self.device = device
        self.model_name = infer_config.model_config.model_name
        self.model_path = infer_config.model_config.model_path
        self.exe_mode = infer_config.model_config.exe_mode
        self.use_pretrained_model = infer_config.model_config.with_ckpt
        self.model = None
        self.model_compiled = None
        self.hf_config = None
        self.comm_manager = None
        self.dtype = torch.bfloat16

    def read_hf_config(self, config_cls):
        """The model's configuration, checked against the parallel sizes."""
        self.hf_config = config_cls.from_pretrained(self.model_path, runner_settings=self.infer_config)
        self.infer_config.validate(self.hf_config)

    def build(self, model_cls):
        """Build the model on the device and load its weights."""
        loader = DefaultModelLoader() if self.use_pretrained_model else DummyModelLoader()
        self.model = loader.load_model(
            config=self.hf_config,
            model_cls=model_cls,
            runner_settings=self.infer_config,
            model_path=self.model_path,
            comm_manager=self.comm_manager,
        )
        if hasattr(self.model, "check_model_settings"):
            self.model.check_model_settings()
        self.model.to(self.device)
        if hasattr(self.model, "process_weights_after_loading"):
            self.model.process_weights_after_loading()
            self.model.to(self.device)

    def get_cache_info(self):
        """The model's cache metadata; None makes the cache Legacy."""
        return self.model.get_cache_info() if hasattr(self.model, "get_cache_info") else None

    def cache_seq_len(self):
        """Tokens per row of the Legacy cache."""
        return self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens

    def init_kvcache(self):
        """Legacy: the model allocates, or every module with k_cache and v_cache gets [batch, length, *cache_unit]."""
        if hasattr(self.model, "init_cache"):
            self.model.init_cache(self.device)
            return
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        for module in self.model.modules():
            if hasattr(module, "k_cache") and hasattr(module, "v_cache"):
                shape = (rows, self.cache_seq_len(), *module.cache_unit)
                module.k_cache = torch.empty(shape, dtype=self.dtype, device=self.device)
                module.v_cache = torch.empty(shape, dtype=self.dtype, device=self.device)

    def inference(self, model_inputs, is_prefill, is_mtp=False):
        """(output of forward, seconds). Decode runs the compiled model in graph modes."""
        torch.npu.synchronize()
        start = time.time()
        compiled = self.exe_mode in ("ge_graph", "npugraph_ex") and not is_prefill
        with torch.no_grad():
            output = (self.model_compiled if compiled else self.model)(**model_inputs)
        torch.npu.synchronize()
        return output, time.time() - start

    def compile_model(self):
        """Graph modes need a device compiler, which this example framework does not carry: decode stays eager."""
        self.model_compiled = self.model
