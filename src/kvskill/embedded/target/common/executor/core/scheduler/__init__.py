"""The scheduler: which requests run next."""

from executor.core.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
