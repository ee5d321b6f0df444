# coding=utf-8
"""Cohere Command-R for the NPU executor.

Ported from the Hugging Face modeling file: Legacy KV cache, SDPA attention, single card.
The framework hands over packed 1-D tokens; they are folded back to [B, S] at the entry (equal-length prompts only).
"""

from typing import Iterable, Optional, Set, Tuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_cohere import CommandRConfig


class CommandRLayerNorm(nn.Module):
    """LayerNorm without bias. ``hidden_size`` may be a tuple: QK norm owns one row of weights per head."""

    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)


class CommandRRotaryEmbedding(nn.Module):
    def __init__(self, config: CommandRConfig):
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        # position_ids: [B, S]
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        freqs = (inv_freq_expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        # interleaved, not concatenated: differs from llama
        emb = torch.repeat_interleave(freqs, 2, dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2):
    dtype = q.dtype
    q, k = q.float(), k.float()
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


class CommandRMLP(nn.Module):
    def __init__(self, config: CommandRConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CommandRAttention(nn.Module):
    def __init__(self, config: CommandRConfig, infer_config: InferenceConfig, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.layer_idx = layer_idx
        attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_heads_per_rank = config.num_attention_heads // attn_tp_size
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // attn_tp_size, 1)
        self.scaling = self.head_dim ** -0.5

        self.q_proj = nn.Linear(
            config.hidden_size, config.num_attention_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(
            config.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(
            config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

        self.use_qk_norm = config.use_qk_norm
        if self.use_qk_norm:
            self.q_norm = CommandRLayerNorm(
                (config.num_attention_heads, self.head_dim), eps=config.layer_norm_eps)
            self.k_norm = CommandRLayerNorm(
                (config.num_key_value_heads, self.head_dim), eps=config.layer_norm_eps)

        # allocated by ModelWorker.init_kvcache as [batch, seq, *cache_unit]
        self.k_cache = self.v_cache = torch.Tensor([])
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

        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads_per_rank, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads_per_rank, self.head_dim)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads_per_rank, self.head_dim)

        if self.use_qk_norm:  # main diff from Llama
            query_states = self.q_norm(query_states)
            key_states = self.k_norm(key_states)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        # The engine's prefill kv_len holds flat slots of the packed tokens. After the BSND fold every row
        # starts at offset 0 of its own cache row.
        if is_prefill:
            kv_len = torch.zeros(bsz, dtype=torch.long, device=hidden_states.device)
        else:
            kv_len = forward_metadata.kv_len

        if not self.k_cache.numel():
            raise RuntimeError("k_cache is not initialized")
        torch_npu.scatter_update_(self.k_cache, kv_len, key_states.view(bsz, q_len, -1), -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states.view(bsz, q_len, -1), -2)

        if not is_prefill:
            # equal-length batch: one common length
            total_len = int(forward_metadata.actual_seq_lengths_kv.max())
            key_states = self.k_cache[:, :total_len].view(bsz, total_len, self.num_kv_heads_per_rank, self.head_dim)
            value_states = self.v_cache[:, :total_len].view(bsz, total_len, self.num_kv_heads_per_rank, self.head_dim)

        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2),
            key_states.transpose(1, 2),
            value_states.transpose(1, 2),
            is_causal=is_prefill,
            scale=self.scaling,
            enable_gqa=True,
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(attn_output)


class CommandRDecoderLayer(nn.Module):
    def __init__(self, config: CommandRConfig, infer_config: InferenceConfig, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.self_attn = CommandRAttention(config, infer_config, layer_idx, prefix=f"{prefix}.self_attn")
        self.mlp = CommandRMLP(config)
        self.input_layernorm = CommandRLayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states, position_embeddings, forward_metadata: ForwardMetaData, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        # attention and MLP read the same normed input
        hidden_states_attention = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            forward_metadata=forward_metadata,
            **kwargs,
        )
        hidden_states_mlp = self.mlp(hidden_states)
        return residual + hidden_states_attention + hidden_states_mlp


class CommandRModel(nn.Module):
    def __init__(self, config: CommandRConfig, infer_config: InferenceConfig, prefix: str = ""):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([
            CommandRDecoderLayer(config, infer_config, layer_idx, prefix=f"{prefix}.layers.{layer_idx}")
            for layer_idx in range(config.num_hidden_layers)
        ])
        self.norm = CommandRLayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = CommandRRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states, position_embeddings=position_embeddings, forward_metadata=forward_metadata, **kwargs)
        return self.norm(hidden_states)


class CommandRForCausalLM(nn.Module):
    def __init__(
        self,
        config: CommandRConfig,
        infer_config: InferenceConfig,
        comm_manager: Optional[CommManager] = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.batch_size_per_dp_rank = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = CommandRModel(config, infer_config, prefix="model")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.logit_scale = config.logit_scale

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        # packed [T] -> [B, S]
        input_ids = input_ids.view(self.batch_size_per_dp_rank, -1)
        position_ids = position_ids.view(self.batch_size_per_dp_rank, -1)

        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)

        if forward_metadata.is_prefill:
            # last token of each prompt, back on the packed axis
            last = forward_metadata.actual_seq_lengths_cu_q - 1
            hidden_states = hidden_states.view(-1, hidden_states.shape[-1]).index_select(0, last).unsqueeze(1)
        logits = self.lm_head(hidden_states)
        logits = logits * self.logit_scale
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        params_dict = dict(self.named_parameters())
        loaded: Set[str] = set()
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], tensor)
            loaded.add(name)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            loaded.add("lm_head.weight")
        return loaded
