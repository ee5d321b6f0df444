"""A runner that pages by hand, with one of the usual mistakes: its number of blocks is rounded down."""

import torch
from models.configuration_dicts import DictsConfig
from models.modeling_dicts import DictsForCausalLM


class DictsRunner:
    def __init__(self, runner_settings):
        self.config = DictsConfig.from_pretrained(runner_settings.get("model_config").get("model_path"))
        self.max_seq_len = runner_settings.get("model_config").get("pa_max_length", 2048)
        self.block_size = runner_settings.get("model_config").get("pa_block_size", 128)
        self.model = DictsForCausalLM(self.config)

    def _init_kvcache(self, batch_size):
        blocks = self.max_seq_len // self.block_size
        self.block_table = torch.arange(batch_size * blocks, dtype=torch.int32).view(batch_size, -1)
        shape = (batch_size * blocks, self.block_size, self.config.num_key_value_heads, self.config.head_dim)
        names = ("key", "value")
        return [{n: torch.zeros(shape) for n in names} for _ in range(self.config.num_hidden_layers)]

    def model_generate(self, prompts, warm_up=False):
        raise NotImplementedError("a case for reading only")
