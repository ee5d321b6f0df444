"""One model of the process; its cache is always Legacy."""

from executor.core.model_worker.worker import Worker


class ModelWorker(Worker):
    """The engine hands in the communication groups; loading allocates the cache."""

    def cache_seq_len(self):
        scheduler = self.infer_config.scheduler_config
        return scheduler.input_max_len + scheduler.max_new_tokens

    def load_model(self, model_cls, config_cls, comm_manager):
        """Read the configuration, build the model, load its weights, allocate its cache."""
        self.comm_manager = comm_manager
        self.read_hf_config(config_cls)
        self.build(model_cls)
        self._init_kvcache()

    def _init_kvcache(self):
        self.init_kvcache()
