"""Settings for every test: one thread, no torch_npu that loads itself, no colours, a fixed width."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = (
    "0"  # an installed wheel without CANN would break `import torch`
)
os.environ.setdefault("NO_COLOR", "1")
os.environ.setdefault("COLUMNS", "120")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
