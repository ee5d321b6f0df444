# coding=utf-8
"""StableLM-3B. Heads of 80 dims, a quarter of them rotated."""
from typing import Iterable, Optional, Tuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch_npu import scatter_update_

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_stablelm import StableLmEpochConfig


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.register_buffer('inv_freq', 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = torch.einsum('bs,d->bsd', position_ids.float(), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def repeat_kv(x, n_rep):
    bsz, n_kv, slen, dim = x.shape
    return x if n_rep == 1 else x[:, :, None].expand(bsz, n_kv, n_rep, slen, dim).reshape(bsz, n_kv * n_rep, slen, dim)


class StableLmMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class StableLmAttention(nn.Module):
    def __init__(self, config: StableLmEpochConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.head_dim = self.hidden_size // self.num_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.rotary_ndims = int(self.head_dim * config.partial_rotary_factor)
        if (self.head_dim * self.num_heads) != self.hidden_size:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")

        self.q_proj = nn.Linear(self.hidden_size, self.num_heads * self.head_dim, bias=config.use_qkv_bias)
        self.k_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=config.use_qkv_bias)
        self.v_proj = nn.Linear(self.hidden_size, self.num_key_value_heads * self.head_dim, bias=config.use_qkv_bias)
        self.o_proj = nn.Linear(self.hidden_size, self.hidden_size, bias=False)

        self.cache_unit = self.num_key_value_heads * self.head_dim
        self.k_cache = None
        self.v_cache = None

    def forward(self, hidden_states, position_embeddings, kv_len, past_len, is_prefill):
        bsz, q_len, _ = hidden_states.size()

        query_states = self.q_proj(hidden_states)
        key_states = self.k_proj(hidden_states)
        value_states = self.v_proj(hidden_states)

        query_states = query_states.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key_states = key_states.view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)

        cos, sin = position_embeddings
        # Partial rotary embedding
        query_rot, query_pass = (
            query_states[..., : self.rotary_ndims],
            query_states[..., self.rotary_ndims :],
        )
        key_rot, key_pass = (
            key_states[..., : self.rotary_ndims],
            key_states[..., self.rotary_ndims :],
        )
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query_states = torch.cat((query_rot, query_pass), dim=-1)
        key_states = torch.cat((key_rot, key_pass), dim=-1)

        # rows of the cache are [S, N * D]
        scatter_update_(self.k_cache, kv_len, key_states.transpose(1, 2).reshape(bsz, q_len, self.cache_unit), -2)
        scatter_update_(self.v_cache, kv_len, value_states, -2)

        kv_seq_len = past_len + q_len
        key_states = self.k_cache[:, :kv_seq_len].view(bsz, kv_seq_len, -1, self.head_dim).transpose(1, 2)
        value_states = self.v_cache[:, :kv_seq_len].view(bsz, kv_seq_len, -1, self.head_dim).transpose(1, 2)

        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_output = scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            attn_mask=None,
            dropout_p=0.0,
            # a single query may see the whole cache
            is_causal=is_prefill and q_len > 1,
        )
        attn_output = attn_output.transpose(1, 2).contiguous().view(bsz, q_len, self.hidden_size)
        return self.o_proj(attn_output)


class StableLmDecoderLayer(nn.Module):
    def __init__(self, config: StableLmEpochConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        self.self_attn = StableLmAttention(config, infer_config, layer_idx)
        self.mlp = StableLmMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = None
        if not self.use_parallel_residual:
            self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states, position_embeddings, kv_len, past_len, is_prefill):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        self_attn_output = self.self_attn(hidden_states, position_embeddings, kv_len, past_len, is_prefill)
        if self.use_parallel_residual:
            # x = x + attn(ln1(x)) + mlp(ln1(x))
            return residual + self_attn_output + self.mlp(hidden_states)
        # x = x + attn(ln1(x)); x = x + mlp(ln2(x))
        residual = residual + self_attn_output
        return residual + self.mlp(self.post_attention_layernorm(residual))


class StableLmModel(nn.Module):
    def __init__(self, config: StableLmEpochConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        for layer_idx in range(config.num_hidden_layers):
            self.layers.append(StableLmDecoderLayer(config, infer_config, layer_idx))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        head_dim = config.hidden_size // config.num_attention_heads
        self.rotary_emb = RotaryEmbedding(int(head_dim * config.partial_rotary_factor), config.rope_theta)
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData):
        # [T] -> [B, S]
        input_ids = input_ids.view(self.batch_size, -1)
        position_ids = position_ids.view(self.batch_size, -1)

        is_prefill = forward_metadata.is_prefill
        if is_prefill:
            past_len = 0
            kv_len = torch.zeros(self.batch_size, dtype=torch.int32, device=input_ids.device)
        else:
            kv_len = forward_metadata.kv_len.to(torch.int32)
            past_len = int(kv_len[0])

        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, kv_len, past_len, is_prefill)
        return self.norm(hidden_states)


class StableLmForCausalLM(nn.Module):
    def __init__(self, config: StableLmEpochConfig, infer_config: InferenceConfig,
                 comm_manager: Optional[CommManager] = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = StableLmModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        """One [B, S, N*D] pair per layer."""
        seq_len = self.infer_config.data_config.input_truncated_len \
            + self.infer_config.scheduler_config.max_new_tokens
        for layer in self.model.layers:
            shape = (self.model.batch_size, seq_len, layer.self_attn.cache_unit)
            layer.self_attn.k_cache = torch.zeros(shape, dtype=self.lm_head.weight.dtype, device=device)
            layer.self_attn.v_cache = torch.zeros(shape, dtype=self.lm_head.weight.dtype, device=device)

    def forward(self, input_ids: torch.LongTensor, position_ids: Optional[torch.LongTensor] = None,
                forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(input_ids, position_ids, forward_metadata)
        logits = self.lm_head(hidden_states)
        if hidden_states.size(1) > 1:
            logits = logits[:, -1:]
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            default_weight_loader(params[name], tensor)
            loaded.add(name)
        return loaded
