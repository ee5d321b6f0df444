"""Weights: copy one tensor, iterate a checkpoint folder, fill with random values."""

import glob
import os

import torch


def default_weight_loader(param, loaded_weight):
    """Copy a checkpoint tensor into a parameter; shapes must match."""
    if param.numel() == 1 and loaded_weight.numel() == 1:
        param.data.fill_(loaded_weight.item())
        return
    if param.shape != loaded_weight.shape:
        raise ValueError(f"weight of shape {tuple(loaded_weight.shape)} does not fit {tuple(param.shape)}")
    param.data.copy_(loaded_weight)


def safetensors_weights_iterator(files):
    """(name, tensor) of every tensor in the given safetensors files."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():
                yield name, handle.get_tensor(name)


def checkpoint_files(model_path):
    """The safetensors files of a folder, in name order."""
    files = sorted(glob.glob(os.path.join(model_path, "*.safetensors")))
    if not files:
        raise RuntimeError(f"no *.safetensors in {model_path}")
    return files


def initialize_dummy_weights(model, low=-1e-3, high=1e-3, seed=1234):
    """Uniform random values, the same for a parameter of the same shape and dtype on every rank."""
    for param in model.state_dict().values():
        if torch.is_floating_point(param):
            generator = torch.Generator(device=param.device).manual_seed(seed)
            param.uniform_(low, high, generator=generator)
