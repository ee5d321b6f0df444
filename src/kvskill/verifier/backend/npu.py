"""Real hardware as a backend. Nothing is replaced: rules and records do not apply, the device is the judge.

Not run by kvskill's own tests: no NPU is at hand there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvskill.verifier.backend.install import BackendError

__all__ = ["install_backend"]


def install_backend(release: str | None) -> dict[str, Any]:
    """Import torch_npu and record SoC, CANN and versions. Raises BackendError when there is no device."""
    if not any(Path("/dev").glob("davinci[0-9]*")):
        raise BackendError("no Ascend device (/dev/davinci*) on this machine")
    try:
        import torch
        import torch_npu
    except (ImportError, OSError) as error:
        raise BackendError(f"torch_npu does not import: {error}") from error
    if release not in (None, torch_npu.__version__):
        raise BackendError(f"torch_npu {torch_npu.__version__} is installed, not {release}")
    if not torch.npu.is_available():
        raise BackendError("torch_npu is installed but reports no available device")
    return {
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "soc": torch.npu.get_device_name(0),
        "cann": _cann_version(),
    }


def _cann_version() -> str | None:
    """Version of the CANN toolkit in use, from its version.info; None when the file is not found."""
    home = Path(os.environ.get("ASCEND_HOME_PATH") or "/usr/local/Ascend/ascend-toolkit/latest")
    for path in (*sorted(home.glob("**/ascend_toolkit_install.info")), home / "version.cfg", home / "version.info"):
        if path.is_file():
            for line in path.read_text(errors="replace").splitlines():
                if line.lower().startswith(("version=", "version:")):
                    return line.split("=" if "=" in line else ":", 1)[1].strip()
    return None
