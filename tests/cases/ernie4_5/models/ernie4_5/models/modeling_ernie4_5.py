# coding=utf-8
"""ERNIE 4.5 dense, tensor parallel attention and MLP.

Weights are cut by rank while they are loaded; row-parallel outputs are summed on the default group.
"""
from typing import Iterable, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_ernie4_5 import ErnieDenseConfig

# which dim of an HF weight belongs to one rank
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


class ErnieRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def precompute_freqs_cis(dim: int, end: int, theta: float) -> torch.Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)  # complex64


def apply_rotary_emb(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """x: [B, S, N, D], neighbouring dims are one complex number; freqs_cis: [B, S, D/2]"""
    x_complex = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    x_out = torch.view_as_real(x_complex * freqs_cis.unsqueeze(2)).flatten(3)
    return x_out.type_as(x)


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: float,
    **kwargs,
):
    key_states = repeat_kv(key.transpose(1, 2), module.num_key_value_groups)
    value_states = repeat_kv(value.transpose(1, 2), module.num_key_value_groups)
    attn_weights = torch.matmul(query.transpose(1, 2), key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights.masked_fill(attention_mask, torch.finfo(attn_weights.dtype).min)
    attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_output = torch.matmul(attn_weights, value_states)
    return attn_output.transpose(1, 2).contiguous(), attn_weights


class ErnieMLP(nn.Module):
    def __init__(self, config: ErnieDenseConfig, infer_config: InferenceConfig):
        super().__init__()
        self.tp_size = infer_config.parallel_config.attn_tp_size
        width = config.intermediate_size // self.tp_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.use_bias)

    def forward(self, x):
        x = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.tp_size > 1:
            dist.all_reduce(x)
        return x


class ErnieAttention(nn.Module):
    def __init__(self, config: ErnieDenseConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.local_heads = config.num_attention_heads // self.tp_size
        self.local_kv_heads = max(config.num_key_value_heads // self.tp_size, 1)
        self.num_key_value_groups = self.local_heads // self.local_kv_heads
        self.scaling = self.head_dim**-0.5

        self.q_proj = nn.Linear(config.hidden_size, self.local_heads * self.head_dim, bias=config.use_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.local_kv_heads * self.head_dim, bias=config.use_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.local_kv_heads * self.head_dim, bias=config.use_bias)
        self.o_proj = nn.Linear(self.local_heads * self.head_dim, config.hidden_size, bias=config.use_bias)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.local_kv_heads, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        freqs_cis: torch.Tensor,
        kv_len: torch.Tensor,
        actual_seq_lengths_kv: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        is_prefill: bool = True,
    ):
        bsz, q_len = hidden_states.shape[:2]
        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.local_heads, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.local_kv_heads, self.head_dim)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, self.local_kv_heads, self.head_dim)

        query_states = apply_rotary_emb(query_states, freqs_cis)
        key_states = apply_rotary_emb(key_states, freqs_cis)

        past_key = torch_npu.scatter_update_(self.k_cache, kv_len, key_states, 1)
        past_value = torch_npu.scatter_update_(self.v_cache, kv_len, value_states, 1)
        if not is_prefill:
            valid = int(actual_seq_lengths_kv.max())
            key_states, value_states = past_key[:, :valid], past_value[:, :valid]

        attn_output, _ = eager_attention_forward(
            self, query_states, key_states, value_states, attention_mask, self.scaling
        )
        attn_output = self.o_proj(attn_output.view(bsz, q_len, self.local_heads * self.head_dim))
        if self.tp_size > 1:
            dist.all_reduce(attn_output)
        return attn_output, (past_key, past_value)


class ErnieDecoderLayer(nn.Module):
    def __init__(self, config: ErnieDenseConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = ErnieAttention(config, infer_config, layer_idx)
        self.mlp = ErnieMLP(config, infer_config)
        self.input_layernorm = ErnieRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ErnieRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        freqs_cis: torch.Tensor,
        kv_len: torch.Tensor,
        actual_seq_lengths_kv: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        is_prefill: bool = True,
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, present_key_value = self.self_attn(
            hidden_states=hidden_states,
            freqs_cis=freqs_cis,
            kv_len=kv_len,
            actual_seq_lengths_kv=actual_seq_lengths_kv,
            attention_mask=attention_mask,
            is_prefill=is_prefill,
        )
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        return (hidden_states, present_key_value)


class ErnieModel(nn.Module):
    def __init__(self, config: ErnieDenseConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [ErnieDecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = ErnieRMSNorm(config.hidden_size, config.rms_norm_eps)
        max_len = infer_config.data_config.input_truncated_len + infer_config.scheduler_config.max_new_tokens
        self.register_buffer(
            "freqs_cis", precompute_freqs_cis(config.head_dim, max_len, config.rope_theta), persistent=False
        )

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        # BSND shim
        input_ids = input_ids.view(self.batch_size, -1)
        position_ids = position_ids.view(self.batch_size, -1)
        q_len = input_ids.size(1)

        kv_len, attention_mask = forward_metadata.kv_len, None
        if forward_metadata.is_prefill:
            kv_len = kv_len.new_zeros(self.batch_size)
            attention_mask = forward_metadata.attention_mask[None, None, :q_len, :q_len]

        hidden_states = self.embed_tokens(input_ids)
        freqs_cis = self.freqs_cis[position_ids]
        for layer in self.layers:
            layer_outputs = layer(
                hidden_states,
                freqs_cis=freqs_cis,
                kv_len=kv_len,
                actual_seq_lengths_kv=forward_metadata.actual_seq_lengths_kv,
                attention_mask=attention_mask,
                is_prefill=forward_metadata.is_prefill,
            )
            hidden_states = layer_outputs[0]
        return self.norm(hidden_states)


class Ernie4_5ForCausalLM(nn.Module):
    def __init__(
        self,
        config: ErnieDenseConfig,
        infer_config: InferenceConfig,
        comm_manager: Optional[CommManager] = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.tp_size = infer_config.parallel_config.attn_tp_size
        self.tp_rank = dist.get_rank() if self.tp_size > 1 else 0
        self.model = ErnieModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ):
        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        if forward_metadata.is_prefill:
            index = (forward_metadata.actual_seq_lengths_q - 1)[:, None, None]
            hidden_states = hidden_states.gather(1, index.expand(-1, 1, hidden_states.size(2)))
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if self.config.tie_word_embeddings and name == "lm_head.weight":
                continue
            module_name = name.split(".")[-2]
            if self.tp_size > 1 and module_name in COLUMN_PARALLEL:
                tensor = tensor.chunk(self.tp_size, dim=0)[self.tp_rank]
            elif self.tp_size > 1 and module_name in ROW_PARALLEL:
                tensor = tensor.chunk(self.tp_size, dim=1)[self.tp_rank]
            default_weight_loader(params_dict[name], tensor)
            loaded.add(name)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            loaded.add("lm_head.weight")
        return loaded
