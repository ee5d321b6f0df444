"""From YAML dicts to dataclasses."""

from dataclasses import fields


def pick(cls, values, **fixed):
    """Build `cls` from the keys it knows; keys it does not know are ignored, as the framework does."""
    known = {field.name for field in fields(cls)}
    return cls(**{**{key: value for key, value in (values or {}).items() if key in known}, **fixed})


def check_divisible(config, names):
    """Every named size must divide world_size."""
    for name in names:
        size = getattr(config, name)
        if size <= 0 or config.world_size % size:
            raise ValueError(f"world_size={config.world_size} is not divisible by {name}={size}")


def check_heads(config, hf_config):
    """Heads and experts must split evenly over their ranks."""
    for attribute, size in (("num_attention_heads", config.attn_tp_size), ("num_experts", config.moe_ep_size)):
        count = getattr(hf_config, attribute, None)
        if count is not None and count % size:
            raise ValueError(f"{attribute}={count} is not divisible by {size}")
