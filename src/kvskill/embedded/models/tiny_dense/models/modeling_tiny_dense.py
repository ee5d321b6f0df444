"""tiny_dense on the framework: plain PyTorch attention with a contiguous (Legacy) KV cache.

State after the first porting step: one card, prompts of equal length in a batch. The framework sends packed 1-D
tokens; the model folds them back to [batch, seq].
"""

from typing import Iterable, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_tiny_dense import TinyDenseConfig


class TinyDenseRMSNorm(nn.Module):
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


class TinyDenseRotaryEmbedding(nn.Module):
    """cos/sin of the positions asked for; no table, so no length limit."""

    def __init__(self, config: TinyDenseConfig):
        super().__init__()
        inv_freq = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
        self.register_buffer("inv_freq", inv_freq.to(torch.float32), persistent=False)

    def forward(self, x, position_ids):
        freqs = position_ids[..., None].to(torch.float32) * self.inv_freq.to(torch.float32)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """q, k: [B, N, S, D]; cos, sin: [B, S, D]."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """[B, Nkv, S, D] -> [B, Nkv * n_rep, S, D]."""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class TinyDenseMLP(nn.Module):
    def __init__(self, config: TinyDenseConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyDenseAttention(nn.Module):
    """Grouped-query attention. The cache holds [batch, length, Nkv * D], rotary already applied to the keys."""

    def __init__(self, config: TinyDenseConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // self.attn_tp_size, 1)
        self.num_key_value_groups = self.num_heads_per_rank // self.num_kv_heads_per_rank
        self.scaling = self.head_dim**-0.5

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads_per_rank * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = TinyDenseRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = TinyDenseRMSNorm(self.head_dim, eps=config.rms_norm_eps)

        # The framework allocates [batch, length, *cache_unit] and binds it to these two.
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_kv_heads_per_rank * self.head_dim,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        forward_metadata: ForwardMetaData,
        **kwargs,
    ) -> torch.Tensor:
        bsz, q_len, _ = hidden_states.size()
        is_prefill = forward_metadata.is_prefill

        query_states = self.q_norm(self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        # Prefill starts each row at 0: the packed kv_len of the framework counts flat slots, not rows.
        if is_prefill:
            write_index = torch.zeros(bsz, dtype=torch.long, device=hidden_states.device)
        else:
            write_index = forward_metadata.kv_len
        torch_npu.scatter_update_(
            self.k_cache, write_index, key_states.transpose(1, 2).reshape(bsz, q_len, -1), -2
        )
        torch_npu.scatter_update_(
            self.v_cache, write_index, value_states.transpose(1, 2).reshape(bsz, q_len, -1), -2
        )

        attn_mask = None
        if not is_prefill:
            # Decode reads every row up to the longest one; shorter rows are masked.
            kv_lens = forward_metadata.actual_seq_lengths_kv
            total = int(kv_lens.max())
            key_states = self.k_cache[:bsz, :total].view(bsz, total, -1, self.head_dim).transpose(1, 2)
            value_states = self.v_cache[:bsz, :total].view(bsz, total, -1, self.head_dim).transpose(1, 2)
            visible = torch.arange(total, device=hidden_states.device)[None, :] < kv_lens[:, None]
            attn_mask = visible[:, None, None, :]

        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_output = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            attn_mask=attn_mask,
            is_causal=is_prefill,
            scale=self.scaling,
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(attn_output)


class TinyDenseDecoderLayer(nn.Module):
    def __init__(self, config: TinyDenseConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = TinyDenseAttention(config, infer_config, layer_idx)
        self.mlp = TinyDenseMLP(config)
        self.input_layernorm = TinyDenseRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = TinyDenseRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, forward_metadata: ForwardMetaData, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            forward_metadata=forward_metadata,
            **kwargs,
        )
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        return residual + self.mlp(hidden_states)


class TinyDenseModel(nn.Module):
    def __init__(self, config: TinyDenseConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [TinyDenseDecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = TinyDenseRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = TinyDenseRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        hidden_states = self.embed_tokens(input_ids)  # [B, S, H]
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                position_embeddings=position_embeddings,
                forward_metadata=forward_metadata,
                **kwargs,
            )
        return self.norm(hidden_states)


class TinyDenseForCausalLM(nn.Module):
    def __init__(
        self,
        config: TinyDenseConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.model = TinyDenseModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        # Packed [TotalTokens] -> [B, S]: all prompts of a batch have the same length here.
        batch_size = forward_metadata.actual_seq_lengths_q.shape[0]
        input_ids = input_ids.view(batch_size, -1)
        position_ids = position_ids.view(batch_size, -1)

        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        if forward_metadata.is_prefill:
            hidden_states = hidden_states[:, -1:, :]  # only the last token of each prompt is sampled
        logits = self.lm_head(hidden_states)
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], tensor)
            loaded.add(name)
        return loaded

    def check_model_settings(self):
        if self.infer_config.parallel_config.attn_tp_size > 1:
            raise RuntimeError("tiny_dense runs on one card: its projections are not sharded")
