# coding=utf-8
# Seed-OSS; keeps the structure and names of the Hugging Face implementation.
#
# Changes for the executor: Legacy KV cache, packed input folded to [B, S], tensor parallel attention and MLP.

from collections.abc import Iterable
from typing import Callable, Optional

import torch
import torch.distributed as dist
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_seed_oss import SeedConfig


class SeedOssRMSNorm(nn.Module):
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

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def shard_loader(dim: int, rank: int, size: int):
    """A weight_loader that keeps this rank's part along `dim`."""

    def load(param: torch.Tensor, loaded_weight: torch.Tensor):
        width = loaded_weight.shape[dim] // size
        default_weight_loader(param, loaded_weight.narrow(dim, rank * width, width))

    return load


def set_sharding(linear: nn.Linear, dim: int, rank: int, size: int):
    for name, param in linear.named_parameters():
        if name == "bias" and dim == 1:
            continue
        param.weight_loader = shard_loader(dim, rank, size)


class SeedOssMLP(nn.Module):
    def __init__(self, config: SeedConfig, tp_size: int, tp_rank: int, tp_group):
        super().__init__()
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.intermediate_size = config.intermediate_size // tp_size
        self.gate_proj = nn.Linear(config.hidden_size, self.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, self.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(self.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        set_sharding(self.gate_proj, 0, tp_rank, tp_size)
        set_sharding(self.up_proj, 0, tp_rank, tp_size)
        set_sharding(self.down_proj, 1, tp_rank, tp_size)

    def forward(self, x):
        down_proj = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.tp_size > 1:
            dist.all_reduce(down_proj, group=self.tp_group)
        return down_proj


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Applies Rotary Position Embedding to the query and key tensors."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """
    This is the equivalent of torch.repeat_interleave(x, dim=1, repeats=n_rep).
    """
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


def sdpa_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    attn_output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return attn_output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS = {
    "eager": eager_attention_forward,
    "sdpa": sdpa_attention_forward,
}


class SeedOssAttention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper"""

    def __init__(self, config: SeedConfig, layer_idx: int, tp_size: int, tp_rank: int, tp_group):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.head_dim = config.head_dim
        self.num_attention_heads_per_rank = config.num_attention_heads // tp_size
        self.num_key_value_heads_per_rank = config.num_key_value_heads // tp_size
        self.num_key_value_groups = self.num_attention_heads_per_rank // self.num_key_value_heads_per_rank
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.residual_dropout = config.residual_dropout
        self.is_causal = True
        self.attn_implementation = "sdpa"

        self.q_proj = nn.Linear(
            config.hidden_size, self.num_attention_heads_per_rank * self.head_dim, bias=config.attention_bias
        )
        self.k_proj = nn.Linear(
            config.hidden_size, self.num_key_value_heads_per_rank * self.head_dim, bias=config.attention_bias
        )
        self.v_proj = nn.Linear(
            config.hidden_size, self.num_key_value_heads_per_rank * self.head_dim, bias=config.attention_bias
        )
        self.o_proj = nn.Linear(
            self.num_attention_heads_per_rank * self.head_dim, config.hidden_size, bias=config.attention_out_bias
        )
        for column in (self.q_proj, self.k_proj, self.v_proj):
            set_sharding(column, 0, tp_rank, tp_size)
        set_sharding(self.o_proj, 1, tp_rank, tp_size)

        # K and V are stored with all query heads
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.head_dim * self.num_attention_heads_per_rank,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Optional[torch.Tensor],
        scatter_index: torch.Tensor,
        kv_seq_len: int,
        **kwargs,
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)

        # [B, N, S, D] -> [B, S, N * D]
        torch_npu.scatter_update_(self.k_cache, scatter_index, key_states.transpose(1, 2).flatten(2), -2)
        torch_npu.scatter_update_(self.v_cache, scatter_index, value_states.transpose(1, 2).flatten(2), -2)

        cached_shape = (input_shape[0], kv_seq_len, -1, self.head_dim)
        key_states = self.k_cache[:, :kv_seq_len].view(cached_shape).transpose(1, 2)
        value_states = self.v_cache[:, :kv_seq_len].view(cached_shape).transpose(1, 2)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS[self.attn_implementation]
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        if self.tp_size > 1:
            dist.all_reduce(attn_output, group=self.tp_group)
        attn_output = nn.functional.dropout(attn_output, p=self.residual_dropout, training=self.training)
        return attn_output, attn_weights


class SeedOssDecoderLayer(nn.Module):
    def __init__(self, config: SeedConfig, layer_idx: int, tp_size: int, tp_rank: int, tp_group):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = SeedOssAttention(config, layer_idx, tp_size, tp_rank, tp_group)
        self.mlp = SeedOssMLP(config, tp_size, tp_rank, tp_group)
        self.input_layernorm = SeedOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = SeedOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Optional[torch.Tensor] = None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        # Self Attention
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class SeedOssRotaryEmbedding(nn.Module):
    def __init__(self, config: SeedConfig):
        super().__init__()
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


class SeedOssModel(nn.Module):
    def __init__(self, config: SeedConfig, infer_config: InferenceConfig, tp_rank: int, tp_group):
        super().__init__()
        tp_size = infer_config.parallel_config.attn_tp_size
        self.cache_seq_len = (
            infer_config.data_config.input_truncated_len + infer_config.scheduler_config.max_new_tokens
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [
                SeedOssDecoderLayer(config, layer_idx, tp_size, tp_rank, tp_group)
                for layer_idx in range(config.num_hidden_layers)
            ]
        )
        self.norm = SeedOssRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = SeedOssRotaryEmbedding(config=config)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: torch.LongTensor,
        forward_metadata: ForwardMetaData,
        past_key_values=None,
        **kwargs,
    ):
        bsz, q_len = input_ids.shape
        # slot of the first new token in each cache row, the same expression in prefill and decode
        scatter_index = (forward_metadata.kv_len.view(bsz, -1)[:, 0] % self.cache_seq_len).to(torch.int32)
        kv_seq_len = int(scatter_index[0]) + q_len

        inputs_embeds = self.embed_tokens(input_ids)
        causal_mask = None
        if forward_metadata.is_prefill:
            causal_mask = torch.full(
                (q_len, q_len), torch.finfo(inputs_embeds.dtype).min, dtype=inputs_embeds.dtype, device=input_ids.device
            ).triu(1)

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                scatter_index=scatter_index,
                kv_seq_len=kv_seq_len,
            )
        return self.norm(hidden_states)


class SeedOssForCausalLM(nn.Module):
    def __init__(
        self,
        config: SeedConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        parallel_config = infer_config.parallel_config
        tp_rank, tp_group = 0, None
        if parallel_config.attn_tp_size > 1:
            if hasattr(comm_manager, "register_group"):
                comm_manager.register_group(
                    name="attn_tp_group",
                    group_num=parallel_config.attn_dp_size,
                    group_size=parallel_config.attn_tp_size,
                )
            tp_rank = comm_manager.get_rank("attn_tp_group")
            tp_group = comm_manager.get_group("attn_tp_group")
        self.model = SeedOssModel(config, infer_config, tp_rank, tp_group)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        total_tokens = input_ids.shape[0]
        batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
        input_ids = input_ids.view(batch_size, total_tokens // batch_size)
        position_ids = position_ids.view(batch_size, total_tokens // batch_size)
        hidden_states = self.model(input_ids, position_ids, forward_metadata)

        # Only compute necessary logits
        logits = self.lm_head(hidden_states[:, -1:, :])
        return logits.float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params_dict = dict(self.named_parameters())
        loaded_params: set[str] = set()
        for name, loaded_weight in weights:
            param = params_dict[name]
            weight_loader = getattr(param, "weight_loader", default_weight_loader)
            weight_loader(param, loaded_weight)
            loaded_params.add(name)
        return loaded_params
