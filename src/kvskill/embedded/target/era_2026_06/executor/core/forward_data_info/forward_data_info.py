"""Requests and batches."""

from executor.core.requests import Batch, GenerationOutput, MTPInfo, Request, SamplingParams, StepOutput

__all__ = ["Batch", "GenerationOutput", "MTPInfo", "Request", "SamplingParams", "StepOutput"]
