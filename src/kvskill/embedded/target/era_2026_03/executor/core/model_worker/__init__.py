"""Workers: one per model."""

from executor.core.model_worker.model_worker import ModelWorker

__all__ = ["ModelWorker"]
