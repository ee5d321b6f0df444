"""Configuration and communication groups."""

from executor.core.config.comm_manager import CommManager
from executor.core.config.inference_config import (
    DataConfig,
    DisaggConfig,
    InferenceConfig,
    ModelConfig,
    ParallelConfig,
    PlatformVersion,
    SchedulerConfig,
)

__all__ = [
    "CommManager",
    "DataConfig",
    "DisaggConfig",
    "InferenceConfig",
    "ModelConfig",
    "ParallelConfig",
    "PlatformVersion",
    "SchedulerConfig",
]
