"""The installed torch_npu wheel as a backend, on a host without an NPU."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kvskill.verifier.backend.install import BackendError
from kvskill.verifier.backend.stubs import build_stubs, load_stubs

__all__ = ["install_backend"]


def install_backend(release: str | None) -> dict[str, Any]:
    """Import torch_npu over stub libraries and put our kernels on its operators. Raises BackendError."""
    try:
        dist = metadata.distribution("torch_npu")
    except metadata.PackageNotFoundError as error:
        raise BackendError("torch_npu is not installed here; install it or use --backend table") from error
    if release not in (None, dist.version):
        raise BackendError(f"torch_npu {dist.version} is installed, not {release}; use --backend table")
    if sys.platform != "linux":
        raise BackendError("the wheel backend needs Linux")
    try:
        import torch
    except ImportError as error:
        raise BackendError("torch is not installed; `pip install kvskill[verify]`") from error
    if "torch_npu" in sys.modules:
        raise BackendError("torch_npu is loaded in this process already; the wheel needs a process without it")
    from kvskill.verifier.backend.device import install_device_map
    from kvskill.verifier.backend.library import implement_operators
    from kvskill.verifier.backend.standin_npu import serve_queries
    from kvskill.verifier.backend.standin_torchair import leave_uncompiled, torchair_modules
    from kvskill.verifier.backend.standin_transfer import serve_transfer

    load_stubs(build_stubs(Path(str(dist.locate_file("torch_npu"))), dist.version))
    module_to = torch.nn.Module.to
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(
            f"torch_npu {dist.version} does not import over stub libraries (torch {torch.__version__}): {error}"
        ) from error
    torch.nn.Module.to = module_to  # torch_npu's own starts a device
    serve_queries(torch.npu)
    implement_operators()
    sys.modules.update(torchair_modules())
    leave_uncompiled()
    serve_transfer()
    install_device_map()
    return {"torch": torch.__version__, "torch_npu": dist.version}
