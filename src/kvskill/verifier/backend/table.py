"""The schema table as a backend: no torch_npu needed."""

from __future__ import annotations

import sys
from typing import Any

from kvskill.verifier.backend.install import BackendError
from kvskill.verifier.backend.schemas import load_table

__all__ = ["install_backend"]


def install_backend(release: str | None) -> dict[str, Any]:
    """Define the operators of `release` and put the stand-ins in place. Raises BackendError."""
    try:
        import torch
    except ImportError as error:
        raise BackendError("torch is not installed; `pip install kvskill[verify]`") from error
    if "torch_npu" in sys.modules:
        raise BackendError("torch_npu is loaded in this process already; the table needs a process without it")
    from kvskill.verifier.backend.device import install_device_map
    from kvskill.verifier.backend.library import define_operators
    from kvskill.verifier.backend.standin_npu import npu_module, torch_npu_module
    from kvskill.verifier.backend.standin_torchair import leave_uncompiled, torchair_modules
    from kvskill.verifier.backend.standin_transfer import serve_transfer

    table = load_table()
    chosen = release or table.newest_for_torch(torch.__version__)
    try:
        schemas = table.schemas(chosen)
    except KeyError as error:
        raise BackendError(str(error.args[0])) from error
    torch.utils.rename_privateuse1_backend("npu")
    npu = npu_module()
    torch._register_device_module("npu", npu)
    define_operators(schemas)
    module: Any = torch_npu_module(chosen, npu, frozenset(table.operators))
    sys.modules.update({"torch_npu": module, "torch_npu.npu": npu, "torch_npu.profiler": module.profiler})
    sys.modules.update(torchair_modules())
    leave_uncompiled()
    serve_transfer()
    install_device_map()
    return {"torch": torch.__version__, "torch_npu": chosen}
