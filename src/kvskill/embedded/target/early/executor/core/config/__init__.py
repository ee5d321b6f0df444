"""Configuration and communication groups."""

from executor.core.config.comm_manager import CommManager
from executor.core.config.inference_config import (
    DataConfig,
    InferenceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)

__all__ = ["CommManager", "DataConfig", "InferenceConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig"]
