"""Stand-in for `torch_npu.contrib.transfer_to_npu`: importing it makes cuda devices stand for npu, hence for the CPU.

Code that names cuda without this import keeps failing, as it does on an NPU host.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

import torch

from kvskill.verifier.backend import device

__all__ = ["serve_transfer"]

_PACKAGE = "torch_npu.contrib"
_MODULE = "torch_npu.contrib.transfer_to_npu"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the two modules before any real ones, and acts when the second is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in (_PACKAGE, _MODULE):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == _PACKAGE)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == _MODULE:
            device.map_cuda()
            torch.cuda.is_available = lambda: True
            torch.cuda.device_count = lambda: 1
            torch.cuda.current_device = lambda: 0
            torch.cuda.set_device = lambda device=None: None
            torch.cuda.synchronize = lambda device=None: None
            torch.cuda.empty_cache = lambda: None


def serve_transfer() -> None:
    """Put the finder first; a real `torch_npu.contrib` that is loaded already is set aside."""
    for name in (_PACKAGE, _MODULE):
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Finder())
