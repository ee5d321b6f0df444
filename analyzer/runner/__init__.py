"""Standalone deployment: model folders with their own `runner_*.py`, which allocate and address the KV cache."""
