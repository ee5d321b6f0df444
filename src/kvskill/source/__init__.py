"""Reading source files as bytes, and speaking about places in them."""

from kvskill.source.file import SourceFile, read_source

__all__ = ["SourceFile", "read_source"]
