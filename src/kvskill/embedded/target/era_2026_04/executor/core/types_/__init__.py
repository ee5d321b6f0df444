"""Requests and batches."""

from executor.core.types_.types import Batch, GenerationOutput, MTPInfo, Request, StepOutput

__all__ = ["Batch", "GenerationOutput", "MTPInfo", "Request", "StepOutput"]
