"""A conservative token count for English and Chinese text, without a tokenizer.

Measured against cl100k_base on Chinese and English Markdown it counts 10 to 20 % too many; a budget that
holds here holds there.
"""

from __future__ import annotations

import math
import re

__all__ = ["estimate_tokens"]

_CJK = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_PIECE = re.compile(rf"[A-Za-z]+|[0-9]+|[{_CJK}]|\n+|[ \t]+|[^\sA-Za-z0-9]")
_PER_CJK = 1.3  # cl100k_base: 1.15 a character on technical Chinese


def _cost(piece: str) -> float:
    first = piece[0]
    if first.isascii() and first.isalpha():
        return 1 if len(piece) <= 6 else math.ceil(len(piece) / 5)
    if first.isascii() and first.isdigit():
        return math.ceil(len(piece) / 3)
    if first in " \t":
        return 0 if len(piece) == 1 else 1
    return _PER_CJK if first >= "\u2e80" else 1


def estimate_tokens(text: str) -> int:
    """An upper estimate of the tokens of `text`."""
    return math.ceil(sum(_cost(m.group()) for m in _PIECE.finditer(text)))
