"""The tokenizer of a model."""

from transformers import AutoTokenizer


def get_tokenizer(model_name, model_path, **kwargs):
    """AutoTokenizer for every model of this example framework."""
    return AutoTokenizer.from_pretrained(model_path, **kwargs)
