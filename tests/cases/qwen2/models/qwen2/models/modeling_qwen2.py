# coding=utf-8
# Copyright 2024 The Qwen team, Alibaba Group and the HuggingFace Inc. team. All rights reserved.
# This code is based on the HuggingFace Qwen2 modeling file, reduced to inference and
# adapted to the executor framework with BSH fused attention.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
"""Inference-only Qwen2 / Qwen2.5 model (dense)."""
import math
from typing import Iterable, Optional, Tuple

import torch
from torch import nn
import torch_npu

from executor.core.config import InferenceConfig, CommManager
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData
from .configuration_qwen2 import Qwen2Config


class Qwen2RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, residual=None):
        if residual is None:
            return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]
        out, _, residual = torch_npu.npu_add_rms_norm(residual, hidden_states, self.weight, self.variance_epsilon)
        return out, residual


class Qwen2RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position_embeddings=2048, base=10000):
        super().__init__()
        self.dim = dim
        self.base = base
        self.max_position_embeddings = max_position_embeddings
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).float() / self.dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.max_seq_len_cached = 0

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        self.max_seq_len_cached = seq_len
        t = torch.arange(seq_len, device=device, dtype=torch.float32)
        freqs = torch.outer(t, self.inv_freq.to(device))
        emb = torch.cat((freqs, freqs), dim=-1)
        self.cos_cached = emb.cos().to(dtype)
        self.sin_cached = emb.sin().to(dtype)

    def forward(self, x, seq_len, kv_len, max_seq_len=None):
        # x: [bs, seq_len, hidden]; returns cos/sin that broadcast over [B, S, N, D]
        if max_seq_len is not None and max_seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len=max_seq_len, device=x.device, dtype=x.dtype)

        if seq_len == 1:
            # BD -> B1ND
            cos = torch.index_select(self.cos_cached, dim=0, index=kv_len).unsqueeze(1).unsqueeze(1)
            sin = torch.index_select(self.sin_cached, dim=0, index=kv_len).unsqueeze(1).unsqueeze(1)
        else:
            # SD -> BSND
            cos = self.cos_cached[:seq_len].unsqueeze(0).unsqueeze(2).repeat(x.size(0), 1, 1, 1)
            sin = self.sin_cached[:seq_len].unsqueeze(0).unsqueeze(2).repeat(x.size(0), 1, 1, 1)
        return cos, sin


class Qwen2MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, config.intermediate_size * 2, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        bsz, q_len, h = x.size()
        merged = self.gate_up_proj(x.view(bsz * q_len, h))
        return self.down_proj(torch_npu.npu_swiglu(merged)).view(bsz, q_len, h)


class Qwen2Attention(nn.Module):
    def __init__(self, config: Qwen2Config, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.exe_mode = infer_config.model_config.exe_mode
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.num_key_value_heads_per_rank = max(config.num_key_value_heads // self.attn_tp_size, 1)
        self.scale_fa = 1 / (math.sqrt(self.head_dim))

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads_per_rank * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads_per_rank * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads_per_rank * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.head_dim, config.hidden_size, bias=False)

        # Qwen2.5 dense checkpoints ship use_sliding_window = false
        if config.use_sliding_window and layer_idx >= config.max_window_layers:
            raise NotImplementedError("sliding window attention is not migrated")

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads_per_rank * self.head_dim,)

        if self.exe_mode == "ge_graph":
            import torchair
            self.fa_ops = torchair.ops
        else:
            self.fa_ops = torch.ops.npu

    def forward(
        self,
        hidden_states: torch.Tensor,
        kv_len: torch.Tensor = None,
        actual_seq_lengths_kv: torch.Tensor = None,
        cos_sin: Tuple[torch.Tensor, torch.Tensor] = None,
        attention_mask: Optional[torch.Tensor] = None,
        is_prefill: bool = True,
        **kwargs,
    ):
        bsz, q_len, _ = hidden_states.size()

        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads_per_rank, self.head_dim)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads_per_rank, self.head_dim)
        value_states = self.v_proj(hidden_states)

        cos, sin = cos_sin
        query_states = torch_npu.npu_rotary_mul(query_states, cos, sin)
        key_states = torch_npu.npu_rotary_mul(key_states, cos, sin)

        query_states = query_states.view(bsz, q_len, -1)
        key_states = key_states.view(bsz, q_len, -1)

        torch_npu.scatter_update_(self.k_cache, kv_len, key_states, -2)
        torch_npu.scatter_update_(self.v_cache, kv_len, value_states, -2)

        if is_prefill:
            attn_output, _ = torch.ops.npu.npu_fused_infer_attention_score(
                query_states, key_states, value_states,
                num_heads=self.num_heads_per_rank,
                num_key_value_heads=self.num_key_value_heads_per_rank,
                input_layout="BSH",
                scale=self.scale_fa,
                atten_mask=attention_mask,
                sparse_mode=3,
                actual_seq_lengths=actual_seq_lengths_kv,
                actual_seq_lengths_kv=actual_seq_lengths_kv,
            )
        else:
            attn_output, _ = self.fa_ops.npu_fused_infer_attention_score(
                query_states, self.k_cache, self.v_cache,
                num_heads=self.num_heads_per_rank,
                num_key_value_heads=self.num_key_value_heads_per_rank,
                input_layout="BSH",
                scale=self.scale_fa,
                atten_mask=None,
                sparse_mode=0,
                actual_seq_lengths_kv=actual_seq_lengths_kv,
            )
        return self.o_proj(attn_output)


class Qwen2DecoderLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = Qwen2Attention(config, infer_config, layer_idx)
        self.mlp = Qwen2MLP(config)
        self.input_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, kv_len, actual_seq_lengths_kv, cos_sin, attention_mask, is_prefill, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(
            hidden_states=hidden_states,
            kv_len=kv_len,
            actual_seq_lengths_kv=actual_seq_lengths_kv,
            cos_sin=cos_sin,
            attention_mask=attention_mask,
            is_prefill=is_prefill,
            **kwargs,
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class Qwen2Model(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Qwen2DecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen2RotaryEmbedding(
            config.hidden_size // config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            base=config.rope_theta,
        )
        self.max_position_embeddings = infer_config.data_config.input_truncated_len + \
            infer_config.scheduler_config.max_new_tokens

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        batch_size, seq_length = input_ids.shape
        is_prefill = forward_metadata.is_prefill

        kv_len = forward_metadata.kv_len
        if is_prefill:
            kv_len = kv_len[::seq_length].contiguous()  # slot of the first token of each prompt
        else:
            kv_len = kv_len[-batch_size:]

        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, seq_length, kv_len, self.max_position_embeddings)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                kv_len,
                forward_metadata.actual_seq_lengths_kv,
                cos_sin,
                attention_mask=forward_metadata.attention_mask if is_prefill else None,
                is_prefill=is_prefill,
                **kwargs,
            )
        return self.norm(hidden_states)


class Qwen2ForCausalLM(nn.Module):
    def __init__(self, config: Qwen2Config, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.batch_size_per_dp_rank = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = Qwen2Model(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.LongTensor = None,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ):
        seq_length = input_ids.numel() // self.batch_size_per_dp_rank
        input_ids = input_ids.view(self.batch_size_per_dp_rank, seq_length)
        position_ids = position_ids.view(self.batch_size_per_dp_rank, seq_length)

        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        if hidden_states.size()[1] > 1:
            last_pos = position_ids.argmax(dim=-1)
            last_pos = last_pos.unsqueeze(1).unsqueeze(2).repeat(1, 1, hidden_states.shape[-1])
            hidden_states = torch.gather(hidden_states, 1, last_pos)
        logits = self.lm_head(hidden_states)
        logits = logits.float()
        return logits

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        for name, loaded_weight in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            if self.config.tie_word_embeddings and "lm_head.weight" in name:
                continue
            if "gate_proj" in name or "up_proj" in name:
                half = 0 if "gate_proj" in name else 1
                name = name.replace("gate_proj", "gate_up_proj") if half == 0 else name.replace("up_proj", "gate_up_proj")
                params_dict[name].data.chunk(2, dim=0)[half].copy_(loaded_weight)
            else:
                default_weight_loader(params_dict[name], loaded_weight)
            loaded_params.add(name)
        return loaded_params
