"""Requests and batches."""

from executor.core.types_.types import Batch, GenerationOutput, Request, StepOutput

__all__ = ["Batch", "GenerationOutput", "Request", "StepOutput"]
