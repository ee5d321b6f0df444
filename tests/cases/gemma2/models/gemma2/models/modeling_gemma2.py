# coding=utf-8
# Adapted from the HuggingFace Gemma2 modeling file (Apache License, Version 2.0)
from typing import Dict, Optional

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_gemma2 import Gemma2Config


class Gemma2RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        out = x.float()
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self.eps)
        return (out * (1.0 + self.weight.float())).type_as(x)


class Gemma2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Gemma2RotaryEmbedding(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x, position_ids):
        freqs = torch.cat([position_ids[..., None].float() * self.inv_freq] * 2, dim=-1)
        return freqs.cos().to(x.dtype)[:, None], freqs.sin().to(x.dtype)[:, None]


def rotate_half(x):
    x1, x2 = x.tensor_split(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def soft_capped_attention(module, query, key, value, mask: Optional[torch.Tensor]):
    """Eager attention with logit soft-capping; all tensors [B, N, S, D]."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)

    attn_weights = torch.matmul(query, key.transpose(2, 3)) * module.scaling
    if module.attn_logit_softcapping is not None:
        attn_weights = attn_weights / module.attn_logit_softcapping
        attn_weights = torch.tanh(attn_weights)
        attn_weights = attn_weights * module.attn_logit_softcapping
    if mask is not None:
        attn_weights = attn_weights + mask

    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(attn_weights, value).transpose(1, 2)


class Gemma2Attention(nn.Module):
    def __init__(self, config: Gemma2Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.is_sliding = not bool(layer_idx % 2)
        self.sliding_window = config.sliding_window if self.is_sliding else None
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = config.query_pre_attn_scalar ** -0.5
        self.attn_logit_softcapping = config.attn_logit_softcapping

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.head_dim * self.num_key_value_heads,)

    def forward(self, hidden_states, position_embeddings, masks: Dict[bool, torch.Tensor], write_pos,
                forward_metadata: ForwardMetaData):
        bsz, q_len, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states)

        cos, sin = position_embeddings
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin

        torch_npu.scatter_update_(self.k_cache, write_pos, key.transpose(1, 2).reshape(bsz, q_len, -1), -2)
        torch_npu.scatter_update_(self.v_cache, write_pos, value, -2)

        mask = masks[self.is_sliding]
        if forward_metadata.is_prefill:
            value = value.view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        else:
            kv_seq_len = mask.shape[-1]
            key = self.k_cache[:, :kv_seq_len].view(bsz, kv_seq_len, -1, self.head_dim).transpose(1, 2)
            value = self.v_cache[:, :kv_seq_len].view(bsz, kv_seq_len, -1, self.head_dim).transpose(1, 2)

        attn_output = soft_capped_attention(self, query, key, value, mask)
        return self.o_proj(attn_output.reshape(bsz, q_len, -1))


class Gemma2DecoderLayer(nn.Module):
    def __init__(self, config: Gemma2Config, layer_idx: int):
        super().__init__()
        self.self_attn = Gemma2Attention(config, layer_idx)
        self.mlp = Gemma2MLP(config)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", Gemma2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, hidden_states, *attn_args):
        attn_output = self.self_attn(self.input_layernorm(hidden_states), *attn_args)
        hidden_states = hidden_states + self.post_attention_layernorm(attn_output)
        mlp_output = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(mlp_output)


class Gemma2Model(nn.Module):
    def __init__(self, config: Gemma2Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([Gemma2DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Gemma2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Gemma2RotaryEmbedding(config.head_dim, config.rope_theta)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        hidden_states = self.embed_tokens(input_ids) * self.config.hidden_size ** 0.5
        total = int(position_ids.max()) + 1
        rel = position_ids[:, None, :, None] - torch.arange(total, device=position_ids.device)
        zero = torch.zeros(rel.shape, dtype=hidden_states.dtype, device=rel.device)
        low = torch.finfo(hidden_states.dtype).min
        masks = {
            False: zero.masked_fill(rel < 0, low),
            True: zero.masked_fill((rel < 0) | (rel >= self.config.sliding_window), low),
        }
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, masks, position_ids[:, 0], forward_metadata)
        return self.norm(hidden_states)


class Gemma2ForCausalLM(nn.Module):
    def __init__(self, config: Gemma2Config, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = Gemma2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None,
                slot_mapping=None, block_table=None, **kwargs):
        bsz = self.infer_config.scheduler_config.batch_size_per_dp_rank
        hidden_states = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        logits = self.lm_head(hidden_states[:, -1:])
        if self.config.final_logit_softcapping is not None:
            logits = self.config.final_logit_softcapping * torch.tanh(logits / self.config.final_logit_softcapping)
        return logits.float()

    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name in params_dict:
                default_weight_loader(params_dict[name], weight)
                loaded.add(name)
        return loaded
