"""tiny_mixed on the framework: sliding-window and full layers over a contiguous (Legacy) KV cache."""

from typing import Iterable, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_tiny_mixed import TinyMixedConfig


class TinyMixedRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class TinyMixedRotaryEmbedding(nn.Module):
    def __init__(self, config: TinyMixedConfig):
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-exponent, persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary(x, cos, sin):
    """x: [B, S, N, D]; cos, sin: [B, S, D]."""
    return x * cos.unsqueeze(2) + rotate_half(x) * sin.unsqueeze(2)


class TinyMixedMLP(nn.Module):
    def __init__(self, config: TinyMixedConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyMixedAttention(nn.Module):
    """Grouped-query attention; a sliding layer sees the last `sliding_window` keys, itself included."""

    def __init__(self, config: TinyMixedConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads // attn_tp_size
        self.num_kv_heads = max(config.num_key_value_heads // attn_tp_size, 1)
        self.scaling = self.head_dim**-0.5
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        forward_metadata: ForwardMetaData,
        **kwargs,
    ) -> torch.Tensor:
        bsz, q_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim)

        cos, sin = position_embeddings
        query_states = apply_rotary(query_states, cos, sin)
        key_states = apply_rotary(key_states, cos, sin)

        if forward_metadata.is_prefill:
            start = torch.zeros(bsz, dtype=torch.long, device=hidden_states.device)
            total = q_len
        else:
            start = forward_metadata.kv_len
            total = int(forward_metadata.actual_seq_lengths_kv.max())
        torch_npu.scatter_update_(self.k_cache, start, key_states, 1)
        torch_npu.scatter_update_(self.v_cache, start, value_states, 1)
        if not forward_metadata.is_prefill:
            key_states = self.k_cache[:bsz, :total]
            value_states = self.v_cache[:bsz, :total]

        # Row i of a prompt is query position start + i; a key is visible if it is not later and inside the window.
        query_pos = start[:, None] + torch.arange(q_len, device=hidden_states.device)[None, :]
        distance = query_pos[:, :, None] - torch.arange(total, device=hidden_states.device)[None, None, :]
        visible = distance >= 0
        if self.sliding_window is not None:
            visible = visible & (distance < self.sliding_window)

        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2),
            key_states.transpose(1, 2),
            value_states.transpose(1, 2),
            attn_mask=visible[:, None],
            scale=self.scaling,
            enable_gqa=True,
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(attn_output)


class TinyMixedDecoderLayer(nn.Module):
    def __init__(self, config: TinyMixedConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = TinyMixedAttention(config, infer_config, layer_idx)
        self.mlp = TinyMixedMLP(config)
        self.input_layernorm = TinyMixedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = TinyMixedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, forward_metadata: ForwardMetaData, **kwargs):
        attn_output = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, forward_metadata, **kwargs
        )
        hidden_states = hidden_states + attn_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class TinyMixedModel(nn.Module):
    def __init__(self, config: TinyMixedConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [TinyMixedDecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = TinyMixedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = TinyMixedRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        batch_size = forward_metadata.actual_seq_lengths_q.shape[0]
        input_ids = input_ids.view(batch_size, -1)
        position_ids = position_ids.view(batch_size, -1)
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, forward_metadata, **kwargs)
        return self.norm(hidden_states)


class TinyMixedForCausalLM(nn.Module):
    def __init__(
        self,
        config: TinyMixedConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = TinyMixedModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        logits = self.lm_head(hidden_states[:, -1:, :])
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name in params_dict:
                default_weight_loader(params_dict[name], tensor)
                loaded.add(name)
            if name == "model.embed_tokens.weight" and self.config.tie_word_embeddings:
                default_weight_loader(self.lm_head.weight, tensor)
                loaded.add("lm_head.weight")
        return loaded

    def check_model_settings(self):
        if self.infer_config.parallel_config.attn_tp_size > 1:
            raise RuntimeError("tiny_mixed runs on one card: its projections are not sharded")
