"""A tokenizer of prompts "#0", "#1", ... that pads as it is told to: the runner's own calls decide how."""

from __future__ import annotations

import re
import zlib
from typing import Any

__all__ = ["Encoded", "StubTokenizer"]


class Encoded(dict):  # type: ignore[type-arg]
    """What a tokenizer returns: keys are attributes too, and `.to(device)` moves the tensors."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoded:
        """The same on another device."""
        return Encoded({k: v.to(device) for k, v in self.items()})


class StubTokenizer:
    """Looks prompts up by name. `batches` are the (ids, padding mask) that it made, the last one at the end.

    A text around one name is that prompt. Another text (a warm-up of the runner's own) gets two tokens that follow from
    it, or one where the runner does not cut prompts to a length.
    """

    pad_token: str | None = "<pad>"
    eos_token = "</s>"
    pad_token_id = 0
    eos_token_id = -1  # no sampled token ends a run: both runners must go the same number of steps
    bos_token_id = 1
    vocab_size = 0

    def __init__(self, prompts: dict[str, list[int]], side: str) -> None:
        self.prompts, self.padding_side = prompts, side
        self.batches: list[tuple[Any, Any]] = []

    def apply_chat_template(self, chats: Any, **kwargs: Any) -> Any:
        """Token ids of one chat or a list of chats; the text when no tensors are asked for."""
        many = chats if chats and isinstance(chats[0], list) else [chats]
        texts = [str(chat[-1]["content"]) for chat in many]
        if kwargs.get("tokenize") is False:
            return texts if many is chats else texts[0]
        return self(texts, **kwargs)

    def __call__(self, texts: Any, **kwargs: Any) -> Encoded:
        import torch

        limit = kwargs.get("max_length")
        cut = limit is not None and bool(kwargs.get("truncation"))
        rows = [self._ids(t, 2 if cut else 1) for t in ([texts] if isinstance(texts, str) else texts)]
        if cut:
            rows = [r[:limit] for r in rows]
        width = max(map(len, rows))
        if kwargs.get("padding") == "max_length" and limit is not None:
            width = limit
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            at = slice(0, len(row)) if self.padding_side == "right" else slice(width - len(row), width)
            ids[i, at], mask[i, at] = torch.tensor(row), 1
        self.batches.append((ids, mask))
        return Encoded(input_ids=ids, attention_mask=mask)

    def _ids(self, text: Any, count: int) -> list[int]:
        if text in self.prompts:
            return list(self.prompts[text])
        named = [n for n in re.findall(r"#\d+", str(text)) if n in self.prompts]
        if len(set(named)) == 1:
            return list(self.prompts[named[0]])
        known = sorted({i for ids in self.prompts.values() for i in ids}) or [self.bos_token_id]
        return [known[zlib.crc32(f"{i}{text}".encode()) % len(known)] for i in range(count)]

    def mask_of(self, ids: Any, row: int) -> Any:
        """The padding mask of these tokens: rows from `row` on of a batch, or any; the newest batch first."""
        import torch

        ids = ids.cpu()
        for made, mask in reversed(self.batches):
            for at in (row, *range(len(made) - len(ids) + 1)):
                if torch.equal(made[at : at + len(ids)], ids.to(made.dtype)):
                    return mask[at : at + len(ids)]
        return self.batches[-1][1][row : row + len(ids)]

    def add_special_tokens(self, *args: Any, **kwargs: Any) -> int:
        """Nothing is added."""
        return 0

    def decode(self, ids: Any, **kwargs: Any) -> str:
        """Text of ids: never compared."""
        return " ".join(str(int(i)) for i in ids)

    def batch_decode(self, rows: Any, **kwargs: Any) -> list[str]:
        """One text a row."""
        return [self.decode(r) for r in rows]
