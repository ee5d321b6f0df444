"""Standalone deployment: edits that turn a runner's contiguous cache into a paged one."""
