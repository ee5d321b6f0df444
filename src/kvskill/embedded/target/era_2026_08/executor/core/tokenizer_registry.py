"""Tokenizers by model name; AutoTokenizer where a model has none of its own."""

import importlib

from transformers import AutoTokenizer


class _Registry:
    """`tokenizers`: model name -> (module, class)."""

    def __init__(self):
        self.tokenizers = {}

    def register(self, model_name, module, class_name):
        self.tokenizers[model_name] = (module, class_name)

    def load_tokenizer(self, model_name, *args, **kwargs):
        if model_name not in self.tokenizers:
            return AutoTokenizer.from_pretrained(*args, **kwargs)
        module, class_name = self.tokenizers[model_name]
        return getattr(importlib.import_module(module), class_name).from_pretrained(*args, **kwargs)


TokenizerRegistry = _Registry()


def get_tokenizer(model_name, *args, **kwargs):
    """The tokenizer of a model."""
    return TokenizerRegistry.load_tokenizer(model_name, *args, **kwargs)
