"""A small Llama-like model with tensor-parallel attention that prepares its own inputs."""

from typing import List, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch import nn

from .configuration_prep import PrepConfig


class PrepRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states):
        return torch_npu.npu_rms_norm(hidden_states, self.weight, self.eps)[0]


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class PrepRotaryEmbedding(nn.Module):
    def __init__(self, config: PrepConfig):
        super().__init__()
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**exponent), persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class PrepAttention(nn.Module):
    def __init__(self, config: PrepConfig, runner_settings, layer_idx: int, **kwargs):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_tp_size = runner_settings.get("parallel_config").get("attn_tp_size", 1)
        self.comm_dict = kwargs.get("comm_dict", None)
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.num_kv_heads_per_rank = max(config.num_key_value_heads // self.attn_tp_size, 1)
        self.num_groups = self.num_heads_per_rank // self.num_kv_heads_per_rank
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads_per_rank * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads_per_rank * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        kv_len: torch.Tensor,
        cos_sin: Tuple[torch.Tensor, torch.Tensor],
        attention_mask: Optional[torch.Tensor] = None,
        past_key_values: Optional[List[Tuple[torch.Tensor, torch.Tensor]]] = None,
        is_prefill: Optional[bool] = False,
    ):
        bsz, q_len, _ = hidden_states.size()
        query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads_per_rank, self.head_dim)
        key = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads_per_rank, self.head_dim)
        value = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads_per_rank, self.head_dim)
        cos, sin = cos_sin[0].unsqueeze(2), cos_sin[1].unsqueeze(2)
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin

        # cache [B, max_len, N, D] of all layers
        key_cache, value_cache = past_key_values[self.layer_idx]
        torch_npu.scatter_update_(key_cache, kv_len, key, 1)
        torch_npu.scatter_update_(value_cache, kv_len, value, 1)
        if not is_prefill:
            used = int(kv_len.max()) + 1
            key, value = key_cache[:, :used], value_cache[:, :used]
        attn_output = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2).repeat_interleave(self.num_groups, dim=1),
            value.transpose(1, 2).repeat_interleave(self.num_groups, dim=1),
            attn_mask=~attention_mask[:q_len, :q_len] if is_prefill else None,
            scale=self.scaling,
        )
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, self.num_heads_per_rank * self.head_dim)
        attn_output = self.o_proj(attn_output)
        if self.attn_tp_size > 1:
            dist.all_reduce(attn_output, group=self.comm_dict.get("attn_tp_group"))
        return attn_output


class PrepMLP(nn.Module):
    def __init__(self, config: PrepConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PrepDecoderLayer(nn.Module):
    def __init__(self, config: PrepConfig, runner_settings, layer_idx: int, **kwargs):
        super().__init__()
        self.self_attn = PrepAttention(config, runner_settings, layer_idx, **kwargs)
        self.mlp = PrepMLP(config)
        self.input_layernorm = PrepRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = PrepRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, kv_len, cos_sin, attention_mask, past_key_values, is_prefill):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = self.self_attn(
            hidden_states=hidden_states,
            kv_len=kv_len,
            cos_sin=cos_sin,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            is_prefill=is_prefill,
        )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class PrepModel(nn.Module):
    def __init__(self, config: PrepConfig, runner_settings, **kwargs):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [PrepDecoderLayer(config, runner_settings, i, **kwargs) for i in range(config.num_hidden_layers)]
        )
        self.norm = PrepRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = PrepRotaryEmbedding(config)

    def forward(self, input_ids, kv_len, attention_mask, position_ids, past_key_values, is_prefill):
        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, kv_len, cos_sin, attention_mask, past_key_values, is_prefill)
        return self.norm(hidden_states)


class PrepForCausalLM(nn.Module):
    def __init__(self, config: PrepConfig, runner_settings):
        super().__init__()
        self.config = config
        self.runner_settings = runner_settings
        self.attn_tp_size = runner_settings.get("parallel_config").get("attn_tp_size", 1)
        self.max_position_embeddings = runner_settings.get("data_config").get("max_position_embeddings", 4096)
        kwargs = {}
        if self.attn_tp_size > 1:
            kwargs["comm_dict"] = self.init_comm_groups()
        self.model = PrepModel(config, runner_settings, **kwargs)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_comm_groups(self):
        group = None
        for first in range(0, dist.get_world_size(), self.attn_tp_size):
            ranks = list(range(first, first + self.attn_tp_size))
            made = dist.new_group(ranks)
            group = made if dist.get_rank() in ranks else group
        return {"attn_tp_group": group}

    def forward(
        self,
        input_ids: torch.LongTensor,
        kv_len: torch.Tensor = None,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.LongTensor] = None,
        past_key_values: Optional[Tuple[Tuple[torch.Tensor, torch.Tensor]]] = None,
        is_prefill: Optional[bool] = False,
    ):
        hidden_states = self.model(
            input_ids=input_ids,
            kv_len=kv_len,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            is_prefill=is_prefill,
        )
        if hidden_states.size()[1] > 1:
            # the last token of each row stands at its largest position
            last = torch.max(position_ids, dim=-1)[0]
            last = last[:, None, None].expand(-1, 1, hidden_states.shape[-1])
            hidden_states = torch.gather(hidden_states, 1, last)
        return self.lm_head(hidden_states).float()

    def prefill(self, **kwargs):
        return self.forward(**kwargs)

    def decode(self, **kwargs):
        return self.forward(**kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        is_prefill=None,
        kv_len=None,
        causal_mask=None,
        **kwargs,
    ):
        batch_size, _ = input_ids.size()
        if is_prefill:
            position_ids = attention_mask.long().cumsum(-1) - 1
            position_ids.masked_fill_(attention_mask == 0, 1)
            attention_mask = causal_mask
            kv_len = torch.zeros(batch_size, dtype=torch.int32, device=input_ids.device)
        else:
            attention_mask = None
            position_ids = kv_len.unsqueeze(1)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "kv_len": kv_len,
            "is_prefill": is_prefill,
        }

    def init_cache(self, input_ids):
        batch_size, _ = input_ids.size()
        num_kv_heads = max(self.config.num_key_value_heads // self.attn_tp_size, 1)
        shape = (batch_size, self.max_position_embeddings, num_kv_heads, self.config.head_dim)
        past_key_values = ()
        for _ in range(self.config.num_hidden_layers):
            key_cache = torch.zeros(shape, dtype=self.config.torch_dtype, device=input_ids.device)
            value_cache = torch.zeros(shape, dtype=self.config.torch_dtype, device=input_ids.device)
            past_key_values += ((key_cache, value_cache),)
        return past_key_values
