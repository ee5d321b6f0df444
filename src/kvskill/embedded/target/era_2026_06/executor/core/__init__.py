"""The inference core."""

from executor.core.config import InferenceConfig, SchedulerConfig
from executor.core.engine import ExecutionEngine
from executor.core.kv_cache import BlockPool, FullAttentionManager, KVCacheManager, SlidingWindowManager
from executor.core.scheduler import Scheduler
from executor.core.forward_data_info import Batch, GenerationOutput, MTPInfo, Request, StepOutput

__all__ = [
    "Batch",
    "BlockPool",
    "ExecutionEngine",
    "FullAttentionManager",
    "GenerationOutput",
    "InferenceConfig",
    "KVCacheManager",
    "MTPInfo",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SlidingWindowManager",
    "StepOutput",
]
