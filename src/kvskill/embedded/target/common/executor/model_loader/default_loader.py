"""Weights from a local checkpoint folder."""

import os

import torch

from executor.model_loader.base_loader import BaseModelLoader
from executor.model_loader.utils import set_default_torch_dtype
from executor.model_loader.weight_utils import checkpoint_files, safetensors_weights_iterator


class DefaultModelLoader(BaseModelLoader):
    """Builds the model and hands its checkpoint to `model.load_weights`."""

    def load_model(self, config, model_cls, runner_settings, model_path, comm_manager=None, **_):
        if not os.path.isdir(model_path):
            raise RuntimeError(f"model directory {model_path} does not exist")
        with set_default_torch_dtype(torch.bfloat16):
            model = model_cls(config, runner_settings, comm_manager=comm_manager)
            model.load_weights(safetensors_weights_iterator(checkpoint_files(model_path)))
        return model.eval()
