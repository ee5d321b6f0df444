"""The inference core."""

from executor.core.config import InferenceConfig, SchedulerConfig
from executor.core.engine import ExecutionEngine
from executor.core.scheduler import Scheduler
from executor.core.types_ import Batch, GenerationOutput, Request, StepOutput

__all__ = [
    "Batch",
    "ExecutionEngine",
    "GenerationOutput",
    "InferenceConfig",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "StepOutput",
]
