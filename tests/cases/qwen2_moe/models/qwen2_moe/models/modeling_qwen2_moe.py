# coding=utf-8
# Adapted from Hugging Face transformers (Qwen2Moe), Apache License 2.0
from typing import Iterable, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.core.config import CommManager, InferenceConfig
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader

from .configuration_qwen2_moe import Qwen2MoeConfig


class Qwen2MoeRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.variance_epsilon = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, epsilon=self.variance_epsilon)[0]


class Qwen2MoeRotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, position_ids):
        angle = torch.einsum("bs,d->bsd", position_ids.float(), self.inv_freq)
        angle = torch.cat([angle, angle], dim=-1)[:, :, None]  # B S 1 D
        return torch.cos(angle), torch.sin(angle)


def _rotate(x, cos, sin):
    left, right = torch.chunk(x, 2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * sin.to(x.dtype)


class Qwen2MoeMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen2MoeSparseMoeBlock(nn.Module):
    def __init__(self, config: Qwen2MoeConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            [Qwen2MoeMLP(config.hidden_size, config.moe_intermediate_size) for _ in range(self.num_experts)]
        )
        self.shared_expert = Qwen2MoeMLP(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        topk_weight, topk_ids = torch.topk(probs, self.top_k, dim=-1)
        if self.norm_topk_prob:
            topk_weight = topk_weight / topk_weight.sum(dim=-1, keepdim=True)
        return topk_ids, topk_weight

    @torch.no_grad()
    def moe_infer(self, x, topk_ids, topk_weight):
        """x: [T, H]. 按专家排序 -> 逐专家计算 -> 还原顺序加权"""
        cnts = topk_ids.new_zeros((topk_ids.shape[0], self.num_experts))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0).tolist()
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]

        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0)

        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        final_out = new_x.view(*topk_ids.shape, -1).type(topk_weight.dtype)
        final_out = final_out.mul_(topk_weight.unsqueeze(dim=-1)).sum(dim=1)
        return final_out.type(new_x.dtype)

    def forward(self, hidden_states):
        orig_shape = hidden_states.shape
        x = hidden_states.view(-1, orig_shape[-1])
        topk_ids, topk_weight = self.route(x)
        y = self.moe_infer(x, topk_ids, topk_weight).view(*orig_shape)
        shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states)
        return y + shared


class Qwen2MoeAttention(nn.Module):
    def __init__(self, config: Qwen2MoeConfig, infer_config: InferenceConfig, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.layer_idx = layer_idx
        self.exe_mode = infer_config.model_config.exe_mode
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.softmax_scale = self.head_dim ** (-0.5)

        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (config.num_key_value_heads * self.head_dim, )

    def update_cache(self, start, key_states, value_states):
        torch_npu.scatter_update_(self.k_cache, start, key_states, 1)
        torch_npu.scatter_update_(self.v_cache, start, value_states, 1)
        return self.k_cache, self.v_cache

    def exec_qkv(self, hidden_states, cos_sin):
        b, s, _ = hidden_states.shape
        cos, sin = cos_sin
        query_states = _rotate(self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim), cos, sin)
        key_states = _rotate(self.k_proj(hidden_states).view(b, s, self.num_key_value_heads, self.head_dim), cos, sin)
        return query_states.flatten(2), key_states.flatten(2), self.v_proj(hidden_states)

    def apply_attention(self, query_states, key_states, value_states, start, forward_metadata: ForwardMetaData):
        past_key, past_value = self.update_cache(start, key_states, value_states)

        atten_mask, sparse_mode = forward_metadata.attention_mask, 3
        kv_lengths = forward_metadata.actual_seq_lengths_kv
        if not forward_metadata.is_prefill:
            # decode：对整段 cache 做 attention，长度由 actual_seq_kvlen 控制
            key_states, value_states = past_key, past_value
            atten_mask, sparse_mode = None, 0
            if self.exe_mode == "npugraph_ex":
                kv_lengths = forward_metadata.actual_seq_lengths_list_kv

        attn_output, _ = torch_npu.npu_fused_infer_attention_score_v2(
            query_states,
            key_states,
            value_states,
            num_query_heads=self.num_heads,
            num_key_value_heads=self.num_key_value_heads,
            input_layout="BSH",
            softmax_scale=self.softmax_scale,
            sparse_mode=sparse_mode,
            atten_mask=atten_mask,
            actual_seq_kvlen=kv_lengths,
        )
        return attn_output

    def forward(self, hidden_states, cos_sin, start, forward_metadata, **kwargs):
        query_states, key_states, value_states = self.exec_qkv(hidden_states, cos_sin)
        attn_output = self.apply_attention(query_states, key_states, value_states, start, forward_metadata)
        return self.o_proj(attn_output), None


class Qwen2MoeDecoderLayer(nn.Module):
    def __init__(self, config: Qwen2MoeConfig, infer_config: InferenceConfig, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.self_attn = Qwen2MoeAttention(config, infer_config, layer_idx, prefix=f"{prefix}.self_attn")
        is_sparse = layer_idx not in config.mlp_only_layers and (layer_idx + 1) % config.decoder_sparse_step == 0
        if config.num_experts > 0 and is_sparse:
            self.mlp = Qwen2MoeSparseMoeBlock(config)
        else:
            self.mlp = Qwen2MoeMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Qwen2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, start, forward_metadata, **kwargs):
        attn_output, _ = self.self_attn(
            self.input_layernorm(hidden_states), cos_sin, start, forward_metadata=forward_metadata, **kwargs
        )
        hidden_states = hidden_states + attn_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Qwen2MoeModel(nn.Module):
    def __init__(self, config, infer_config, prefix=""):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([
            Qwen2MoeDecoderLayer(config, infer_config, i, prefix=f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        ])
        self.norm = Qwen2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen2MoeRotaryEmbedding(
            config.hidden_size // config.num_attention_heads, config.rope_theta
        )

    def forward(self, input_ids, position_ids, forward_metadata: ForwardMetaData, **kwargs):
        batch = forward_metadata.actual_seq_lengths_q.shape[0]
        input_ids, position_ids = input_ids.view(batch, -1), position_ids.view(batch, -1)
        start = position_ids[:, :1].squeeze(-1)  # 写入起点：prefill 为 0，decode 为 kv_len

        hidden_states = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, cos_sin, start, forward_metadata, **kwargs)
        hidden_states = self.norm(hidden_states)

        q_len = hidden_states.size(1)
        if q_len > 1:
            hidden_states = hidden_states[:, -1, :].unsqueeze(1)
        return hidden_states


class Qwen2MoeForCausalLM(nn.Module):
    def __init__(self, config: Qwen2MoeConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.model = Qwen2MoeModel(config, infer_config, prefix="model")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        slot_mapping=None,
        block_table=None,
        **kwargs
    ):
        hidden_states = self.model(input_ids, position_ids, forward_metadata, **kwargs)
        return self.lm_head(hidden_states).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in params_dict:
                continue
            default_weight_loader(params_dict[name], weight)
            loaded.add(name)
        return loaded

    def process_weights_after_loading(self):
        for _, module in self.named_modules():
            qm = getattr(module, "quant_method", None)
            if qm is not None and hasattr(qm, "process_weights_after_loading"):
                qm.process_weights_after_loading(module)
