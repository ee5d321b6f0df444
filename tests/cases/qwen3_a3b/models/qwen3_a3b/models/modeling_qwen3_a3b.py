# coding=utf-8
# Adapted from transformers' Qwen3Moe (Apache-2.0). Single card, eager.
# 注意: 本文件处于 Legacy KV 阶段, 未接入 get_cache_info.

from typing import Iterable, List, Optional, Tuple

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_qwen3_a3b import Qwen3MoeConfig


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, *args):
        if len(args) == 0:  # only hidden_states exists
            return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]
        residual = args[0]
        if residual is None:
            normed = torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]
            return normed, hidden_states
        normed, _, residual = torch_npu.npu_add_rms_norm(
            residual, hidden_states, self.weight, self.variance_epsilon
        )
        return normed, residual


class FusedExperts(nn.Module):
    """w13: [E, 2I, H], w2: [E, H, I] as loaded; transposed for grouped matmul afterwards."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        num, inter, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.intermediate_size = inter
        self.w13_weight = nn.Parameter(torch.empty(num, 2 * inter, hidden), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(num, hidden, inter), requires_grad=False)

    def process_weights_after_loading(self):
        self.w13_weight.data = self.w13_weight.data.transpose(1, 2).contiguous()
        self.w2_weight.data = self.w2_weight.data.transpose(1, 2).contiguous()

    def forward(self, expanded_x, tokens_per_expert):
        gate_up = torch_npu.npu_grouped_matmul(
            [expanded_x], [self.w13_weight],
            group_list=tokens_per_expert, group_list_type=1, split_item=3, group_type=0,
        )[0]
        act = torch_npu.npu_swiglu(gate_up)
        return torch_npu.npu_grouped_matmul(
            [act], [self.w2_weight],
            group_list=tokens_per_expert, group_list_type=1, split_item=3, group_type=0,
        )[0]


class Qwen3MoeSparseMoeBlock(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = FusedExperts(config)

    def forward(self, x):
        batch_size, sequence_length, h = x.shape
        hidden_states = x.view(-1, h)

        router_logits = self.gate(hidden_states)
        topk_weight, topk_idx, _ = torch_npu.npu_moe_gating_top_k_softmax(router_logits, None, k=self.top_k)
        if self.norm_topk_prob:
            topk_weight = topk_weight / topk_weight.sum(dim=-1, keepdim=True)

        expanded_x, expanded_row_idx, tokens_per_expert, _ = torch_npu.npu_moe_init_routing_v2(
            hidden_states,
            expert_idx=topk_idx,
            active_num=topk_idx.numel(),
            expert_num=self.num_experts,
            expert_tokens_num_type=1,  # 0: cumsum mode; 1: count mode
            expert_tokens_num_flag=True,
            active_expert_range=[0, self.num_experts],
            quant_mode=-1,
        )
        expert_out = self.experts(expanded_x, tokens_per_expert)
        y = torch_npu.npu_moe_finalize_routing(
            expert_out,
            skip1=None, skip2=None, bias=None,
            scales=topk_weight.to(expert_out.dtype),
            expanded_src_to_dst_row=expanded_row_idx,
            export_for_source_row=None,
            drop_pad_mode=2,
        )
        return y.view(batch_size, sequence_length, h)


class Qwen3MoeRotaryEmbedding(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        dim = config.head_dim
        inv_freq = config.rope_theta ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq.reciprocal(), persistent=False)

    def forward(self, x, position_ids):
        freqs = torch.matmul(position_ids.unsqueeze(-1).float(), self.inv_freq.unsqueeze(0))
        freqs = torch.cat((freqs, freqs), dim=-1).unsqueeze(2)
        return freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)


class Qwen3MoeAttention(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads, self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos_sin: Tuple[torch.Tensor, torch.Tensor],
        past_key_values: List[Tuple[torch.Tensor, torch.Tensor]],
        cache_index: torch.Tensor,
        forward_metadata: ForwardMetaData,
        **kwargs,
    ):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        bsz, q_len = input_shape

        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape))
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape))
        value_states = self.v_proj(hidden_states).view(hidden_shape)

        cos, sin = cos_sin
        query_states, key_states = torch_npu.npu_apply_rotary_pos_emb(
            query_states, key_states, cos, sin, layout="BSND"
        )

        torch_npu.scatter_update_(past_key_values[self.layer_idx][0], cache_index, key_states, 1)
        torch_npu.scatter_update_(past_key_values[self.layer_idx][1], cache_index, value_states, 1)

        if forward_metadata.is_prefill:
            # engine mask: True = masked; SDPA wants True = visible
            mask = ~forward_metadata.attention_mask[:q_len, :q_len]
        else:
            lengths = forward_metadata.actual_seq_lengths_kv
            max_len = int(lengths.max())
            key_states = past_key_values[self.layer_idx][0][:, :max_len]
            value_states = past_key_values[self.layer_idx][1][:, :max_len]
            mask = torch.arange(max_len, device=lengths.device).view(1, 1, 1, -1) < lengths.view(-1, 1, 1, 1)

        attn_output = F.scaled_dot_product_attention(
            query_states.transpose(1, 2),
            key_states.transpose(1, 2),
            value_states.transpose(1, 2),
            attn_mask=mask,
            scale=self.scaling,
            enable_gqa=True,
        )
        attn_output = attn_output.transpose(1, 2).contiguous().view(bsz, q_len, -1)
        return self.o_proj(attn_output)


class Qwen3MoeDecoderLayer(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Qwen3MoeAttention(config, layer_idx)
        self.mlp = Qwen3MoeSparseMoeBlock(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, past_residual=None, **kwargs):
        hidden_states, residual = self.input_layernorm(hidden_states, past_residual)
        # Self Attention
        hidden_states = self.self_attn(hidden_states, cos_sin, **kwargs)
        # Fully Connected
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        outputs = (residual, hidden_states)
        return outputs


class Qwen3MoeModel(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Qwen3MoeDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3MoeRotaryEmbedding(config)

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        # packed -> [B, S]
        batch_size = forward_metadata.actual_seq_lengths_kv.shape[0]
        input_ids = input_ids.view(batch_size, -1)
        position_ids = position_ids.view(batch_size, -1)

        # collected per step: the framework rebinds k_cache / v_cache after construction
        past_key_values = [(layer.self_attn.k_cache, layer.self_attn.v_cache) for layer in self.layers]
        if forward_metadata.is_prefill:
            cache_index = torch.zeros(batch_size, dtype=torch.int64, device=input_ids.device)
        else:
            cache_index = forward_metadata.kv_len

        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(hidden_states, position_ids)
        residual = None
        for decoder_layer in self.layers:
            residual, hidden_states = decoder_layer(
                hidden_states,
                cos_sin,
                past_residual=residual,
                past_key_values=past_key_values,
                cache_index=cache_index,
                forward_metadata=forward_metadata,
                **kwargs,
            )
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Qwen3MoeForCausalLM(nn.Module):
    def __init__(
        self,
        config: Qwen3MoeConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.model = Qwen3MoeModel(config)
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
            rows = forward_metadata.actual_seq_lengths_cu_q - 1
            hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])[rows].unsqueeze(1)
        logits = self.lm_head(hidden_states)
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        inter = self.config.moe_intermediate_size
        for name, weight in weights:
            if ".mlp.experts." in name:
                # model.layers.{i}.mlp.experts.{e}.{gate,up,down}_proj.weight
                head, tail = name.split(".experts.")
                expert_id, proj, _ = tail.split(".")
                key = f"{head}.experts.w2_weight" if proj == "down_proj" else f"{head}.experts.w13_weight"
                target = params_dict[key].data[int(expert_id)]
                if proj == "gate_proj":
                    target = target[:inter]
                elif proj == "up_proj":
                    target = target[inter:]
                target.copy_(weight)
                loaded_params.add(key)
                continue
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], weight)
            loaded_params.add(name)
        return loaded_params

    def process_weights_after_loading(self):
        for layer in self.model.layers:
            layer.mlp.experts.process_weights_after_loading()


__all__ = ["Qwen3MoeForCausalLM", "Qwen3MoeModel"]
