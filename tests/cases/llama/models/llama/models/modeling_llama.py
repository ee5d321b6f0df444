# coding=utf-8
# Adapted from the Llama implementation of Hugging Face transformers (Apache-2.0):
# training code, Cache classes and mask utilities removed, KV cache kept in the framework's contiguous form.
"""Llama 3.1 for the executor framework (single card and attention TP)."""

import math
from typing import Iterable, Optional, Set, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_llama import LlamaConfig


class LlamaRMSNorm(nn.Module):
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


def _llama3_inv_freq(config: LlamaConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Smooth frequency interpolation of Llama 3.1: long wavelengths are divided by `factor`."""
    scaling = config.rope_scaling
    factor = scaling["factor"]
    low_freq_factor = scaling["low_freq_factor"]
    high_freq_factor = scaling["high_freq_factor"]
    old_context_len = scaling["original_max_position_embeddings"]

    low_freq_wavelen = old_context_len / low_freq_factor
    high_freq_wavelen = old_context_len / high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_freq_wavelen, inv_freq / factor, inv_freq)
    smooth = (old_context_len / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    is_medium = ~(wavelen < high_freq_wavelen) * ~(wavelen > low_freq_wavelen)
    return torch.where(is_medium, smoothed, scaled)


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        dim = config.head_dim
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        if config.rope_scaling is not None and config.rope_scaling.get("rope_type") == "llama3":
            inv_freq = _llama3_inv_freq(config, inv_freq)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        # position_ids: [B, S] -> cos, sin: [B, S, D]
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """[B, Nkv, S, D] -> [B, Nkv * n_rep, S, D]"""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig, infer_config: InferenceConfig):
        super().__init__()
        self.tp_size = infer_config.parallel_config.attn_tp_size
        intermediate_size = config.intermediate_size // self.tp_size
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x):
        down_proj = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.tp_size > 1:
            dist.all_reduce(down_proj)
        return down_proj


class LlamaAttention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper"""

    def __init__(self, config: LlamaConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.num_key_value_heads_per_rank = max(config.num_key_value_heads // self.attn_tp_size, 1)
        self.num_key_value_groups = self.num_heads_per_rank // self.num_key_value_heads_per_rank
        self.scaling = self.head_dim**-0.5

        self.q_proj = nn.Linear(
            config.hidden_size, self.num_heads_per_rank * self.head_dim, bias=config.attention_bias
        )
        self.k_proj = nn.Linear(
            config.hidden_size, self.num_key_value_heads_per_rank * self.head_dim, bias=config.attention_bias
        )
        self.v_proj = nn.Linear(
            config.hidden_size, self.num_key_value_heads_per_rank * self.head_dim, bias=config.attention_bias
        )
        self.o_proj = nn.Linear(
            self.num_heads_per_rank * self.head_dim, config.hidden_size, bias=config.attention_bias
        )

        # Legacy KV cache: the framework allocates [batch, cache_seq_len, *cache_unit]
        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads_per_rank * self.head_dim,)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        forward_metadata: ForwardMetaData,
        kv_len: torch.Tensor,
        **kwargs,
    ) -> torch.Tensor:
        bsz, q_len, _ = hidden_states.size()

        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads_per_rank, self.head_dim)
        key_states = self.k_proj(hidden_states).view(
            bsz, q_len, self.num_key_value_heads_per_rank, self.head_dim
        )
        value_states = self.v_proj(hidden_states)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        # write the new tokens into the contiguous cache, BSH layout
        key_states = key_states.reshape(bsz, q_len, -1)
        torch_npu.scatter_update_(self.k_cache, kv_len, key_states, -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states, -2)

        if not forward_metadata.is_prefill:
            # decode: every token written so far, including the one above
            total_len = int(kv_len.max()) + 1
            key_states = self.k_cache[:, :total_len]
            value_states = self.v_cache[:, :total_len]

        kv_shape = (bsz, -1, self.num_key_value_heads_per_rank, self.head_dim)
        query_states = query_states.transpose(1, 2)
        key_states = key_states.reshape(kv_shape).transpose(1, 2)
        value_states = value_states.reshape(kv_shape).transpose(1, 2)
        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)

        attn_output = F.scaled_dot_product_attention(
            query_states,
            key_states,
            value_states,
            is_causal=forward_metadata.is_prefill,
            scale=self.scaling,
        )

        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(bsz, q_len, -1)
        attn_output = self.o_proj(attn_output)
        if self.attn_tp_size > 1:
            dist.all_reduce(attn_output)
        return attn_output


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LlamaAttention(config, infer_config, layer_idx)
        self.mlp = LlamaMLP(config, infer_config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        forward_metadata: ForwardMetaData,
        kv_len: torch.Tensor,
        **kwargs,
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)

        # Self Attention
        hidden_states = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            forward_metadata=forward_metadata,
            kv_len=kv_len,
            **kwargs,
        )
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig, infer_config: InferenceConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: torch.LongTensor,
        forward_metadata: ForwardMetaData,
        **kwargs,
    ) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)

        # In prefill the framework's kv_len holds flat slots for the packed tokens; every row starts at 0 here.
        kv_len = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            kv_len = torch.zeros(input_ids.shape[0], dtype=torch.int64, device=input_ids.device)

        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                position_embeddings=position_embeddings,
                forward_metadata=forward_metadata,
                kv_len=kv_len,
                **kwargs,
            )

        return self.norm(hidden_states)


class LlamaForCausalLM(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager

        parallel_config = infer_config.parallel_config
        self.attn_tp_size = parallel_config.attn_tp_size
        self.lmhead_tp_size = parallel_config.lmhead_tp_size
        self.global_rank = parallel_config.global_rank
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank

        self.model = LlamaModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size // self.lmhead_tp_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        slot_mapping=None,
        block_table=None,
        **kwargs,
    ) -> torch.Tensor:
        # BSND shim: packed [TotalTokens] -> [B, S]; prompts of one batch have the same length here
        input_ids = input_ids.view(self.batch_size, -1)
        position_ids = position_ids.view(self.batch_size, -1)

        hidden_states = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            forward_metadata=forward_metadata,
            **kwargs,
        )

        bsz, _, hidden_size = hidden_states.shape
        if forward_metadata.is_prefill:
            # only the last token of each prompt goes through lm_head
            last_index = forward_metadata.actual_seq_lengths_cu_q - 1
            hidden_states = torch.index_select(hidden_states.view(-1, hidden_size), 0, last_index)
            hidden_states = hidden_states.view(bsz, 1, hidden_size)

        logits = self.lm_head(hidden_states)
        if self.lmhead_tp_size > 1:
            gathered = [torch.empty_like(logits) for _ in range(self.lmhead_tp_size)]
            dist.all_gather(gathered, logits.contiguous())
            logits = torch.cat(gathered, dim=-1)
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        """Load a Hugging Face checkpoint; column/row parallel weights are cut to this rank's slice."""
        attn_rank = self.global_rank % self.attn_tp_size
        head_rank = self.global_rank % self.lmhead_tp_size
        params_dict = dict(self.named_parameters())
        loaded_params: Set[str] = set()

        for name, weight in weights:
            if "rotary_emb.inv_freq" in name or name not in params_dict:
                continue
            param = params_dict[name]
            if any(key in name for key in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                # column parallel. More ranks than KV heads: neighbouring ranks hold the same head
                rows = param.shape[0]
                shards = weight.shape[0] // rows
                weight = weight.narrow(0, attn_rank * shards // self.attn_tp_size * rows, rows)
            elif "o_proj.weight" in name or "down_proj.weight" in name:
                # row parallel
                cols = param.shape[1]
                weight = weight.narrow(1, attn_rank * cols, cols)
            elif "lm_head" in name:
                rows = param.shape[0]
                weight = weight.narrow(0, head_rank * rows, rows)
            default_weight_loader(param, weight)
            loaded_params.add(name)
        return loaded_params

    def process_weights_after_loading(self):
        for _, module in self.named_modules():
            quant_method = getattr(module, "quant_method", None)
            if quant_method is not None and hasattr(quant_method, "process_weights_after_loading"):
                quant_method.process_weights_after_loading(module)

    def check_model_settings(self):
        if self.config.num_attention_heads % self.attn_tp_size != 0:
            raise RuntimeError(
                f"num_attention_heads={self.config.num_attention_heads} "
                f"is not divisible by attn_tp_size={self.attn_tp_size}"
            )


__all__ = ["LlamaForCausalLM", "LlamaModel"]
