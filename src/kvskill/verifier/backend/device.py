"""Device npu served by the CPU: constructors and moves are mapped, `.npu()` is the identity.

`torch.device("npu")` is mapped as well, so that it equals the device of the tensors made with it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as torch_device

__all__ = ["NpuOnCpu", "install_device_map", "map_cuda", "to_cpu"]

_served = {"npu", "privateuseone"}  # device types that the CPU stands for

def to_cpu(device: Any) -> Any:
    """`cpu` for any spelling of a served device, everything else unchanged."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in _served else device
    if isinstance(device, str) and device.partition(":")[0] in _served:
        return "cpu"
    return device


def map_cuda() -> None:
    """Serve cuda devices as well, as `torch_npu.contrib.transfer_to_npu` does."""
    _served.add("cuda")
    torch.Tensor.cuda = torch.Tensor.npu
    torch.nn.Module.cuda = torch.nn.Module.npu


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
        if func is torch.nn.functional.one_hot and args and args[0].dtype in (torch.int32, torch.uint8):
            args = (args[0].long(), *args[1:])  # aclnnOneHot takes INT32, INT64 and UINT8; the CPU only int64
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
