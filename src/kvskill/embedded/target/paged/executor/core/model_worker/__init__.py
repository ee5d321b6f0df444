"""Workers: one per model; the MTP worker drafts tokens for the main one."""

from executor.core.model_worker.model_worker import ModelWorker
from executor.core.model_worker.mtp_worker import MTPWorker

__all__ = ["MTPWorker", "ModelWorker"]
