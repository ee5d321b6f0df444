"""Device npu served by the CPU: constructors and moves are mapped, `.npu()` is the identity.

`torch.device("npu")` is mapped as well, so that it equals the device of the tensors made with it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as torch_device

__all__ = ["NpuOnCpu", "install_device_map", "to_cpu"]

def to_cpu(device: Any) -> Any:
    """`cpu` for any spelling of an npu device, everything else unchanged."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in ("npu", "privateuseone") else device
    if isinstance(device, str) and (device == "npu" or device.startswith("npu:")):
        return "cpu"
    return device


class NpuOnCpu(TorchFunctionMode):  # type: ignore[misc]
    """Rewrites npu devices in every torch call of this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": to_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if any(isinstance(a, (torch.device, str)) for a in args):
            args = tuple(to_cpu(a) for a in args)
        return func(*args, **kwargs)


def install_device_map() -> None:
    """Switch the mapping on for this thread and all threads started later; for the rest of the process."""
    NpuOnCpu().__enter__()
    run = threading.Thread.run

    def run_mapped(self: threading.Thread) -> None:
        with NpuOnCpu():
            run(self)

    threading.Thread.run = run_mapped  # type: ignore[method-assign]
    init = torch_device.DeviceContext.__init__

    def init_mapped(self: Any, device: Any) -> None:
        # `with torch.device("npu")` and set_default_device act below every mode
        init(self, to_cpu(device))

    torch_device.DeviceContext.__init__ = init_mapped

    def identity(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.npu = identity
    torch.Tensor.pin_memory = identity
    torch.Tensor.is_pinned = lambda self, *a: False
    torch.Tensor.is_npu = property(lambda self: True)
    torch.nn.Module.npu = identity
