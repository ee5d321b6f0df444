# coding=utf-8
# Phi-1.5 on NPU: fused attention over a contiguous cache, one sequence at a time.

from typing import Iterable, Optional, Tuple

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_phi import PhiMicrosoftConfig


class PhiRotaryEmbedding(nn.Module):
    """cos/sin for the rotated part of a head only."""

    def __init__(self, config: PhiMicrosoftConfig):
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        self.dim = int(head_dim * config.partial_rotary_factor)
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)


def apply_partial_rotary(states, cos, sin):
    ndims = cos.shape[-1]
    rot, rest = states.split([ndims, states.shape[-1] - ndims], dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((rot * cos + rotate_half(rot) * sin, rest), dim=-1)


class PhiAttention(nn.Module):
    def __init__(self, config: PhiMicrosoftConfig, infer_config: InferenceConfig, layer_idx: int, prefix: str):
        super().__init__()
        self.layer_idx = layer_idx
        self.tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_attention_heads_per_rank = config.num_attention_heads // self.tp_size
        self.num_key_value_heads_per_rank = max(config.num_key_value_heads // self.tp_size, 1)
        self.scaling = self.head_dim ** -0.5
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=True)
        self.dense = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=True)

        self.k_cache = self.v_cache = torch.Tensor()  # will be set by init_kvcache
        self.cache_unit = (self.num_key_value_heads_per_rank, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        kv_len: torch.Tensor,
        forward_metadata: ForwardMetaData,
        **kwargs,
    ):
        input_shape = hidden_states.shape[:-1]
        # (bsz, q_len, -1, head_dim)
        hidden_shape = (*input_shape, -1, self.head_dim)
        q_len = input_shape[1]

        query_states = self.q_proj(hidden_states).view(hidden_shape)
        key_states = self.k_proj(hidden_states).view(hidden_shape)
        value_states = self.v_proj(hidden_states).view(hidden_shape)

        cos, sin = position_embeddings
        query_states = apply_partial_rotary(query_states, cos, sin)
        key_states = apply_partial_rotary(key_states, cos, sin)

        k_cache, v_cache = self.k_cache, self.v_cache
        if not (k_cache.numel() and v_cache.numel()):
            raise RuntimeError("k_cache and v_cache are not initialized properly.")
        torch_npu.scatter_update_(k_cache, kv_len, key_states, 1)
        torch_npu.scatter_update_(v_cache, kv_len, value_states, 1)
        actual_seq_lengths_kv = forward_metadata.actual_seq_lengths_kv
        if q_len == 1:
            total = int(actual_seq_lengths_kv[0])
            key_states, value_states = k_cache[:, :total, :, :], v_cache[:, :total, :, :]

        actual_seq_qlen = [query_states.shape[1]]
        query_states = query_states.reshape(-1, self.num_attention_heads_per_rank, self.head_dim)
        key_states = key_states.reshape(-1, self.num_key_value_heads_per_rank, self.head_dim)
        value_states = value_states.reshape(-1, self.num_key_value_heads_per_rank, self.head_dim)

        attn_output, _ = torch_npu.npu_fused_infer_attention_score_v2(
            query_states,
            key_states,
            value_states,
            num_query_heads=self.num_attention_heads_per_rank,
            num_key_value_heads=self.num_key_value_heads_per_rank,
            input_layout="TND",
            softmax_scale=self.scaling,
            sparse_mode=3,
            atten_mask=forward_metadata.attention_mask,
            actual_seq_qlen=actual_seq_qlen,
            actual_seq_kvlen=actual_seq_lengths_kv,
        )
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.dense(attn_output)


class PhiMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation_fn = nn.GELU(approximate="tanh")  # gelu_new
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        return self.fc2(hidden_states)


class PhiDecoderLayer(nn.Module):
    def __init__(self, config: PhiMicrosoftConfig, infer_config: InferenceConfig, layer_idx: int, prefix: str):
        super().__init__()
        self.self_attn = PhiAttention(config, infer_config, layer_idx, f"{prefix}.self_attn")
        self.mlp = PhiMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        attn_outputs = self.self_attn(hidden_states, **kwargs)
        feed_forward_hidden_states = self.mlp(hidden_states)
        return attn_outputs + feed_forward_hidden_states + residual


class PhiModel(nn.Module):
    def __init__(self, config: PhiMicrosoftConfig, infer_config: InferenceConfig, prefix: str):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([
            PhiDecoderLayer(config, infer_config, i, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        ])
        self.rotary_emb = PhiRotaryEmbedding(config)
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids, position_ids, kv_len, forward_metadata, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                position_embeddings=position_embeddings,
                kv_len=kv_len,
                forward_metadata=forward_metadata,
            )
        return self.final_layernorm(hidden_states)


class PhiForCausalLM(nn.Module):
    def __init__(
        self,
        config: PhiMicrosoftConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "model",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = PhiModel(config, infer_config, "model")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)

    def forward(
        self,
        input_ids: torch.LongTensor = None,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ):
        batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
        input_ids = input_ids.view(batch_size, -1)
        position_ids = position_ids.view(batch_size, -1)
        kv_len = forward_metadata.kv_len[-batch_size:]
        if forward_metadata.is_prefill:
            kv_len = torch.zeros_like(kv_len)

        hidden_states = self.model(input_ids, position_ids, kv_len, forward_metadata, **kwargs)

        # right end of each row
        last = forward_metadata.actual_seq_lengths_q - 1
        last = last.view(batch_size, 1, 1).expand(-1, -1, hidden_states.shape[-1])
        hidden_states = torch.gather(hidden_states, 1, last)
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, loaded_weight in weights:
            param = params_dict.get(name)
            if param is None:
                continue
            default_weight_loader(param, loaded_weight)
            loaded_params.add(name)
        return loaded_params
