# coding=utf-8
"""OLMo 1.7 for the executor."""
import torch
from torch import nn
from torch.nn import functional as F

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .attention_olmo import CachedAttention
from .configuration_olmo import OlmoPortConfig


class OlmoLayerNorm(nn.Module):
    """LayerNorm but with no learnable weight or bias."""

    def __init__(self, hidden_size):
        super().__init__()
        self.normalized_shape = (hidden_size,)

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, None, None, eps=1e-5).to(x.dtype)


class OlmoMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OlmoDecoderLayer(nn.Module):
    def __init__(self, config: OlmoPortConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = CachedAttention(config, infer_config, layer_idx)
        self.mlp = OlmoMLP(config)
        self.input_layernorm = OlmoLayerNorm(config.hidden_size)
        self.post_attention_layernorm = OlmoLayerNorm(config.hidden_size)

    def forward(self, hidden_states, cos_sin, kv_len, total_len, is_prefill):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), cos_sin, kv_len, total_len, is_prefill)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OlmoModel(nn.Module):
    def __init__(self, config: OlmoPortConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [OlmoDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = OlmoLayerNorm(config.hidden_size)
        dim = config.hidden_size // config.num_attention_heads
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        bsz, q_len = input_ids.shape
        is_prefill = forward_metadata.is_prefill
        kv_len, total_len = forward_metadata.kv_len, int(forward_metadata.actual_seq_lengths_kv.max())
        if is_prefill:
            kv_len = torch.zeros(bsz, dtype=torch.long, device=input_ids.device)
        hidden_states = self.embed_tokens(input_ids)
        emb = (position_ids[..., None].float() * self.inv_freq).repeat(1, 1, 2).unsqueeze(2)
        cos_sin = (emb.cos().to(hidden_states.dtype), emb.sin().to(hidden_states.dtype))
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos_sin, kv_len, total_len, is_prefill)
        return self.norm(hidden_states)


class OlmoForCausalLM(nn.Module):
    def __init__(self, config: OlmoPortConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = OlmoModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids.view(self.batch_size, -1), position_ids.view(self.batch_size, -1), forward_metadata)
        return self.lm_head(hidden_states[:, -1:]).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
