"""Default dtype while a model is built."""

import contextlib

import torch


@contextlib.contextmanager
def set_default_torch_dtype(dtype):
    """Parameters created inside have `dtype`; the previous default comes back even after an error."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
