"""Requests and batches."""

from executor.core.forward_data_info.forward_data_info import (
    Batch,
    GenerationOutput,
    MTPInfo,
    Request,
    SamplingParams,
    StepOutput,
)

__all__ = ["Batch", "GenerationOutput", "MTPInfo", "Request", "SamplingParams", "StepOutput"]
