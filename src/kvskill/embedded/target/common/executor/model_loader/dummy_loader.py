"""Random weights, for runs without a checkpoint."""

import torch

from executor.model_loader.base_loader import BaseModelLoader
from executor.model_loader.utils import set_default_torch_dtype
from executor.model_loader.weight_utils import initialize_dummy_weights


class DummyModelLoader(BaseModelLoader):
    """Builds the model and fills it with small random numbers."""

    def load_model(self, config, model_cls, runner_settings, comm_manager=None, **_):
        with set_default_torch_dtype(torch.bfloat16):
            model = model_cls(config, runner_settings, comm_manager=comm_manager)
            initialize_dummy_weights(model)
        return model.eval()
