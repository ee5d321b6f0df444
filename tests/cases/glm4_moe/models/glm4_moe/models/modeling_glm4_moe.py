# coding=utf-8
"""GLM-4.5 MoE. Legacy KV cache, SDPA; attention, dense MLP and experts are tensor parallel."""
import re
from typing import Iterable, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_glm4_moe import GlmMoeConfig


class GlmRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.float()
        hidden_states = hidden_states * torch.rsqrt(
            hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class GlmRotary(nn.Module):
    def __init__(self, config: GlmMoeConfig):
        super().__init__()
        dim = int(config.head_dim * config.partial_rotary_factor)
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2:], x[..., : x.shape[-1] // 2]), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)

    # Keep half or full tensor for later concatenation
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]

    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


class GlmMLP(nn.Module):
    def __init__(self, config: GlmMoeConfig, intermediate_size: int, tp_size: int, reduce_output: bool = True):
        super().__init__()
        self.reduce_output = reduce_output and tp_size > 1
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size // tp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size // tp_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size // tp_size, config.hidden_size, bias=False)

    def forward(self, x):
        x = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        if self.reduce_output:
            dist.all_reduce(x)
        return x


class GlmTopkRouter(nn.Module):
    def __init__(self, config: GlmMoeConfig):
        super().__init__()
        self.config = config
        self.n_experts = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(self.n_experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(self.n_experts, dtype=torch.float32))

    def forward(self, hidden_states):
        """[T, H] -> expert ids [T, k], weights [T, k]"""
        cfg = self.config
        scores = F.linear(hidden_states.float(), self.weight).sigmoid()
        choice = scores + self.e_score_correction_bias
        grouped = choice.view(-1, cfg.n_group, self.n_experts // cfg.n_group)
        group_idx = grouped.topk(2, dim=-1)[0].sum(dim=-1).topk(cfg.topk_group, dim=-1)[1]
        group_mask = torch.zeros(grouped.shape[:2], device=scores.device).scatter_(1, group_idx, 1)
        choice = grouped.masked_fill(group_mask.unsqueeze(-1) == 0, float("-inf")).flatten(1)
        topk_idx = choice.topk(cfg.num_experts_per_tok, dim=-1, sorted=False)[1]
        topk_weight = scores.gather(1, topk_idx)
        if cfg.norm_topk_prob:
            topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_idx, topk_weight * cfg.routed_scaling_factor


class GlmMoE(nn.Module):
    def __init__(self, config: GlmMoeConfig, infer_config: InferenceConfig):
        super().__init__()
        self.moe_tp_size = infer_config.parallel_config.moe_tp_size
        self.num_experts = config.n_routed_experts
        width = config.moe_intermediate_size // self.moe_tp_size
        self.w13 = nn.Parameter(torch.empty(self.num_experts, 2, width, config.hidden_size), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, width), requires_grad=False)
        self.gate = GlmTopkRouter(config)
        self.shared_experts = GlmMLP(
            config, config.moe_intermediate_size * config.n_shared_experts, self.moe_tp_size, reduce_output=False)

    def moe_infer(self, x, topk_idx, topk_weight):
        """Tokens sorted by expert, one matmul pair per expert."""
        flat_expert = topk_idx.reshape(-1)
        order = flat_expert.argsort(stable=True)
        tokens_per_expert = torch.bincount(flat_expert, minlength=self.num_experts).tolist()
        sorted_tokens = x[order // topk_idx.shape[1]]

        outputs, start = [], 0
        for expert, count in enumerate(tokens_per_expert):
            if count == 0:
                continue
            chunk = sorted_tokens[start:start + count]
            gate, up = F.linear(chunk, self.w13[expert, 0]), F.linear(chunk, self.w13[expert, 1])
            outputs.append(F.linear(F.silu(gate) * up, self.w2[expert]))
            start += count
        outs = torch.cat(outputs, dim=0)

        unsorted = torch.empty_like(outs)
        unsorted[order] = outs
        unsorted = unsorted.view(*topk_idx.shape, -1)
        return (unsorted * topk_weight.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def forward(self, hidden_states):
        identity = hidden_states
        orig_shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, orig_shape[-1])
        topk_idx, topk_weight = self.gate(hidden_states)
        y = self.moe_infer(hidden_states, topk_idx, topk_weight).view(*orig_shape)
        y = y + self.shared_experts(identity)
        if self.moe_tp_size > 1:
            dist.all_reduce(y)
        return y


class GlmAttention(nn.Module):
    def __init__(self, config: GlmMoeConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.head_dim
        self.num_heads_per_rank = config.num_attention_heads // self.attn_tp_size
        self.num_key_value_heads_per_rank = max(config.num_key_value_heads // self.attn_tp_size, 1)
        self.scaling = self.head_dim ** -0.5

        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.num_heads_per_rank * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_key_value_heads_per_rank * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_key_value_heads_per_rank * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads_per_rank * self.head_dim, hidden, bias=False)

        self.use_qk_norm = config.use_qk_norm
        if self.use_qk_norm:
            self.q_norm = GlmRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = GlmRMSNorm(self.head_dim, eps=config.rms_norm_eps)

        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (self.num_key_value_heads_per_rank * self.head_dim,)

    def exec_qkv(self, hidden_states, position_embeddings):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape)
        key_states = self.k_proj(hidden_states).view(hidden_shape)
        value_states = self.v_proj(hidden_states).view(hidden_shape)
        if self.use_qk_norm:  # main diff from Llama
            query_states = self.q_norm(query_states)
            key_states = self.k_norm(key_states)
        query_states = query_states.transpose(1, 2)
        key_states = key_states.transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        return query_states, key_states, value_states.transpose(1, 2)

    def write_cache(self, key_states, value_states, forward_metadata):
        bsz = key_states.shape[0]
        start = forward_metadata.kv_len
        if forward_metadata.is_prefill:
            start = torch.zeros(bsz, dtype=start.dtype, device=start.device)
        # [B, S, N*D] -> [B, S, N, D], still the same storage
        shape = (*self.k_cache.shape[:2], self.num_key_value_heads_per_rank, self.head_dim)
        torch_npu.scatter_update_(self.k_cache.view(shape), start, key_states.transpose(1, 2), 1)
        torch_npu.scatter_update_(self.v_cache.view(shape), start, value_states.transpose(1, 2), 1)

    def read_cache(self, forward_metadata):
        end = int(forward_metadata.actual_seq_lengths_kv.max().item())
        shape = (self.k_cache.shape[0], end, self.num_key_value_heads_per_rank, self.head_dim)
        return (
            self.k_cache[:, :end].view(shape).transpose(1, 2),
            self.v_cache[:, :end].view(shape).transpose(1, 2),
        )

    def exec_sdpa(self, query_states, key_states, value_states, forward_metadata):
        attn_mask = None
        if forward_metadata.is_prefill:
            q_len = query_states.shape[2]
            attn_mask = torch.zeros(q_len, q_len, dtype=query_states.dtype, device=query_states.device)
            attn_mask.masked_fill_(forward_metadata.attention_mask[:q_len, :q_len], float("-inf"))
        return F.scaled_dot_product_attention(
            query_states, key_states, value_states, attn_mask=attn_mask, scale=self.scaling, enable_gqa=True)

    def forward(self, hidden_states, position_embeddings, forward_metadata: ForwardMetaData):
        bsz, q_len, _ = hidden_states.shape
        query_states, key_states, value_states = self.exec_qkv(hidden_states, position_embeddings)
        self.write_cache(key_states, value_states, forward_metadata)
        if not forward_metadata.is_prefill:
            key_states, value_states = self.read_cache(forward_metadata)
        attn_output = self.exec_sdpa(query_states, key_states, value_states, forward_metadata)
        attn_output = self.o_proj(attn_output.transpose(1, 2).reshape(bsz, q_len, -1))
        if self.attn_tp_size > 1:
            dist.all_reduce(attn_output)
        return attn_output


class GlmDecoderLayer(nn.Module):
    def __init__(self, config: GlmMoeConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.self_attn = GlmAttention(config, infer_config, layer_idx)
        if layer_idx >= config.first_k_dense_replace:
            self.mlp = GlmMoE(config, infer_config)
        else:
            self.mlp = GlmMLP(config, config.intermediate_size, infer_config.parallel_config.attn_tp_size)
        self.input_layernorm = GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, position_embeddings, forward_metadata):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, forward_metadata)
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


class GlmModel(nn.Module):
    def __init__(self, config: GlmMoeConfig, infer_config: InferenceConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([
            GlmDecoderLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = GlmRotary(config)

    def forward(self, input_ids, position_ids, forward_metadata):
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings, forward_metadata)
        return self.norm(hidden_states)


class GlmMoeForCausalLM(nn.Module):
    def __init__(self, config: GlmMoeConfig, infer_config: InferenceConfig,
                 comm_manager: Optional[CommManager] = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        parallel_config = infer_config.parallel_config
        self.attn_tp_size = parallel_config.attn_tp_size
        self.moe_tp_size = parallel_config.moe_tp_size
        self.rank = dist.get_rank() if parallel_config.world_size > 1 else 0
        self.model = GlmModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        hidden_states = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        if forward_metadata.is_prefill:
            # last real token of each row
            rows = torch.arange(bsz, device=input_ids.device)
            hidden_states = hidden_states[rows, forward_metadata.actual_seq_lengths_q - 1].unsqueeze(1)
        return self.lm_head(hidden_states).float()

    def _shard(self, tensor, dim, size):
        return tensor if size == 1 else tensor.chunk(size, dim=dim)[self.rank % size]

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]):
        params_dict = dict(self.named_parameters())
        loaded_params = set()
        expert_name = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
        for name, weight in weights:
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer and int(layer.group(1)) >= self.config.num_hidden_layers:
                continue  # MTP layer

            expert = expert_name.match(name)
            if expert:
                mlp, idx, kind = expert.group(1), int(expert.group(2)), expert.group(3)
                if kind == "down":
                    target = f"{mlp}.w2"
                    params_dict[target].data[idx].copy_(self._shard(weight, 1, self.moe_tp_size))
                else:
                    target = f"{mlp}.w13"
                    params_dict[target].data[idx, int(kind == "up")].copy_(self._shard(weight, 0, self.moe_tp_size))
                loaded_params.add(target)
                continue

            tp_size = self.moe_tp_size if "shared_experts" in name else self.attn_tp_size
            if re.search(r"\.(q|k|v|gate|up)_proj\.", name):
                weight = self._shard(weight, 0, tp_size)
            elif re.search(r"\.(o|down)_proj\.", name):
                weight = self._shard(weight, 1, tp_size)
            default_weight_loader(params_dict[name], weight)
            loaded_params.add(name)
        return loaded_params
