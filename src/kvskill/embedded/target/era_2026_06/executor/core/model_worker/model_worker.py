"""One model of the process."""

from executor.core.config import CommManager
from executor.core.model_worker.worker import Worker


class ModelWorker(Worker):
    """The first worker creates the communication groups' manager, the others share it."""

    def init(self, model_cls, config_cls, comm_manager=None):
        """Read the configuration, build the model (which registers its groups), load its weights."""
        self.read_hf_config(config_cls)
        if comm_manager is None:
            comm_manager = CommManager(
                self.infer_config.parallel_config,
                platform_version=self.infer_config.model_config.platform_version,
            )
        self.comm_manager = comm_manager
        self.build(model_cls)
