"""The engine: from a batch of requests to logits."""

from executor.core.engine.execution_engine import ExecutionEngine

__all__ = ["ExecutionEngine"]
