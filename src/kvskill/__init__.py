"""kvskill: convert Legacy KV caches of Ascend LLM code to paged attention, and prove it.

Importing this package must stay cheap: `kvskill --version` has 0.2 s.
"""

from kvskill._version import __version__

__all__ = ["__version__"]
