"""One model of the process."""

from executor.core.model_worker.worker import Worker


class ModelWorker(Worker):
    """The engine hands in the communication groups."""

    def load_model(self, model_cls, config_cls, comm_manager):
        """Read the configuration, build the model, load its weights."""
        self.comm_manager = comm_manager
        self.read_hf_config(config_cls)
        self.build(model_cls)
