"""A small target repository and Legacy models, written for tests and for `kvskill demo`.

`materialise` builds a repository in one of the API forms that the real framework went through, so that
everything can be tried without it. Nothing here is imported by kvskill: the files are copied out, and read
or run there.
"""

from kvskill.embedded.materialise import ERAS, MODELS, RUNNERS, materialise, materialise_runner

__all__ = ["ERAS", "MODELS", "RUNNERS", "materialise", "materialise_runner"]
