# coding=utf-8
# Derived from the Phi-3 modeling file of Hugging Face transformers (Apache License 2.0).
# Short-context rotary only: input_truncated_len + max_new_tokens must stay within 4096.
import math

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_phi4_mini import Phi4MiniConfig

write_cache = torch_npu.scatter_update_


class PhiRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, states):
        wide = states.float()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return self.weight * wide.to(states.dtype)


class LongRope(nn.Module):
    """cos / sin of the first `rotary_dim` dims, [B, 1, S, rotary_dim]."""

    def __init__(self, config: Phi4MiniConfig):
        super().__init__()
        dim = config.rotary_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        stretch = torch.tensor(config.short_factor or [1.0] * (dim // 2), dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / (stretch * config.rope_theta**exponent), persistent=False)
        ratio = config.max_position_embeddings / config.original_max_position_embeddings
        self.amplitude = 1.0
        if ratio > 1.0:
            self.amplitude = math.sqrt(1 + math.log(ratio) / math.log(config.original_max_position_embeddings))

    def forward(self, position_ids, dtype):
        freqs = position_ids[:, None, :, None].float() * self.inv_freq
        freqs = torch.cat((freqs, freqs), dim=-1)
        return (freqs.cos() * self.amplitude).to(dtype), (freqs.sin() * self.amplitude).to(dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_partial_rotary(q, k, cos, sin):
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
    k = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
    return q, k


def repeat_kv(x, n_rep):
    if n_rep == 1:
        return x
    batch, heads, length, dim = x.shape
    return x.unsqueeze(2).expand(-1, -1, n_rep, -1, -1).reshape(batch, heads * n_rep, length, dim)


def eager_attention(module, query, key, value, causal):
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    weights = query @ key.transpose(-1, -2) * module.scaling
    if causal:
        rows, cols = weights.shape[-2:]
        future = torch.ones((rows, cols), dtype=torch.bool, device=weights.device).triu(1)
        weights = weights + torch.zeros_like(weights).masked_fill_(future, float("-inf"))
    weights = weights.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


class Phi4MiniAttention(nn.Module):
    def __init__(self, config: Phi4MiniConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, config.hidden_size, bias=False)

        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (self.head_dim * self.num_kv_heads,)

    def forward(self, hidden_states, *, position_embeddings, past_key_value, cache_position, forward_metadata):
        batch, length, _ = hidden_states.shape
        query, key, value = self.qkv_proj(hidden_states).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query = query.reshape(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = key.reshape(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)

        query, key = apply_partial_rotary(query, key, *position_embeddings)
        key = key.transpose(1, 2).reshape(batch, length, self.kv_size)

        k_cache, v_cache = past_key_value
        write_cache(k_cache, cache_position, key, -2)
        write_cache(v_cache, cache_position, value.contiguous(), -2)

        is_prefill = forward_metadata.is_prefill
        if not is_prefill:
            seen = int(forward_metadata.actual_seq_lengths_kv.max())
            key, value = k_cache[:, :seen], v_cache[:, :seen]
        key = key.reshape(batch, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = value.reshape(batch, -1, self.num_kv_heads, self.head_dim).transpose(1, 2)

        attn_output = eager_attention(self, query, key, value, causal=is_prefill)
        return self.o_proj(attn_output.view(batch, length, self.q_size))


class Phi4MiniMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        return self.down_proj(torch_npu.npu_swiglu(self.gate_up_proj(hidden_states), dim=-1))


class Phi4MiniDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = Phi4MiniAttention(config)
        self.mlp = Phi4MiniMLP(config)
        self.input_layernorm = PhiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = PhiRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, *, position_embeddings, cache_position, forward_metadata):
        attn_output = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            past_key_value=(self.self_attn.k_cache, self.self_attn.v_cache),
            cache_position=cache_position,
            forward_metadata=forward_metadata,
        )
        hidden_states = hidden_states + attn_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Phi4MiniModel(nn.Module):
    def __init__(self, config: Phi4MiniConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([Phi4MiniDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = PhiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LongRope(config)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        num_seqs = len(forward_metadata.actual_seq_lengths_q)
        input_ids = input_ids.view(num_seqs, -1)
        position_ids = position_ids.view(num_seqs, -1)

        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(position_ids, hidden_states.dtype)
        cache_position = position_ids[:, 0].contiguous()  # first written slot per row
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                cache_position=cache_position,
                forward_metadata=forward_metadata,
            )
        return self.norm(hidden_states)


class Phi4MiniForCausalLM(nn.Module):
    def __init__(
        self,
        config: Phi4MiniConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = Phi4MiniModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def check_model_settings(self):
        longest = self.infer_config.data_config.input_truncated_len
        longest += self.infer_config.scheduler_config.max_new_tokens
        if longest > self.config.original_max_position_embeddings:
            raise RuntimeError(f"{longest} positions need the long rotary factors, which are not supported")

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(input_ids, position_ids, forward_metadata)
        num_seqs, _, hidden_size = hidden_states.shape
        ends = torch.cumsum(forward_metadata.actual_seq_lengths_q, dim=0) - 1
        hidden_states = hidden_states.reshape(-1, hidden_size).index_select(0, ends)
        return self.lm_head(hidden_states).reshape(num_seqs, 1, -1).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in params:
                continue
            default_weight_loader(params[name], weight)
            loaded.add(name)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            loaded.add("lm_head.weight")
        return loaded
