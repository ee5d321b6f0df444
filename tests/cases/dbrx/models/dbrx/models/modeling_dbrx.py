"""DBRX. Router, experts and the fused attention block of the published model."""
from typing import Optional, Tuple, TypedDict

import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_dbrx import DbrxConfig


class StepInputs(TypedDict):
    rope: Tuple[torch.Tensor, torch.Tensor]
    write_index: torch.Tensor
    meta: ForwardMetaData


class DbrxAttention(nn.Module):
    def __init__(self, config: DbrxConfig, infer_config: InferenceConfig, block_idx: Optional[int] = None):
        super().__init__()
        attn_config = config.attn_config
        self.block_idx = block_idx
        self.d_model = config.d_model
        self.num_heads = config.n_heads
        self.head_dim = self.d_model // self.num_heads
        self.num_key_value_heads = attn_config["kv_n_heads"]
        self.clip_qkv = attn_config["clip_qkv"]
        self.Wqkv = nn.Linear(
            self.d_model, self.d_model + 2 * self.num_key_value_heads * self.head_dim, bias=False
        )
        self.out_proj = nn.Linear(self.d_model, self.d_model, bias=False)
        self.k_cache, self.v_cache = torch.Tensor(), torch.Tensor()
        self.cache_unit = (self.num_key_value_heads * self.head_dim,)

    def forward(self, hidden_states: torch.Tensor, step: StepInputs) -> torch.Tensor:
        bsz, q_len = hidden_states.shape[:2]
        qkv_states = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv_states = qkv_states.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        kv_width = self.num_key_value_heads * self.head_dim
        query_states = qkv_states[..., : self.d_model].view(bsz, q_len, -1, self.head_dim)
        key_states = qkv_states[..., self.d_model : -kv_width].view(bsz, q_len, -1, self.head_dim)
        value_states = qkv_states[..., -kv_width:].contiguous()
        cos, sin = step["rope"]
        query_states = torch_npu.npu_rotary_mul(query_states, cos, sin).reshape(bsz, q_len, self.d_model)
        key_states = torch_npu.npu_rotary_mul(key_states, cos, sin).reshape(bsz, q_len, kv_width)

        torch_npu.scatter_update_(self.k_cache, step["write_index"], key_states, -2)
        torch_npu.scatter_update_(self.v_cache, step["write_index"], value_states, -2)
        lengths, sparse_mode, mask = None, 3, step["meta"].attention_mask
        if not step["meta"].is_prefill:
            key_states, value_states = self.k_cache, self.v_cache
            lengths, sparse_mode, mask = step["meta"].actual_seq_lengths_kv, 0, None
        attn_output, _ = torch_npu.npu_fused_infer_attention_score_v2(
            query_states, key_states, value_states,
            num_query_heads=self.num_heads, num_key_value_heads=self.num_key_value_heads,
            softmax_scale=self.head_dim ** -0.5, input_layout="BSH", sparse_mode=sparse_mode, atten_mask=mask,
            actual_seq_kvlen=lengths,
        )
        return self.out_proj(attn_output)


class DbrxNormAttentionNorm(nn.Module):
    def __init__(self, config, infer_config, block_idx):
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.d_model, bias=False)
        self.attn = DbrxAttention(config, infer_config, block_idx)
        self.norm_2 = nn.LayerNorm(config.d_model, bias=False)

    def forward(self, hidden_states, step):
        residual_states = hidden_states
        hidden_states = self.attn(self.norm_1(hidden_states), step) + residual_states
        return hidden_states, self.norm_2(hidden_states)


class DbrxFFN(nn.Module):
    def __init__(self, config):
        super().__init__()
        ffn = config.ffn_config
        self.count, self.top_k, self.inner = ffn["moe_num_experts"], ffn["moe_top_k"], ffn["ffn_hidden_size"]
        self.router = nn.ModuleDict({"layer": nn.Linear(config.d_model, self.count, bias=False)})
        self.experts = nn.Module()
        self.experts.mlp = nn.Module()
        for name in ("w1", "v1", "w2"):
            setattr(self.experts.mlp, name, nn.Parameter(torch.empty(self.count * self.inner, config.d_model)))

    def forward(self, x):
        rows, cols, width = x.shape
        flat = x.view(-1, width)
        weights = self.router["layer"](flat).softmax(dim=-1)
        top_weights, top_experts = weights.topk(self.top_k, dim=-1)
        top_weights = top_weights / top_weights.abs().sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        experts = self.experts.mlp
        for index in range(self.count):
            mine = slice(index * self.inner, (index + 1) * self.inner)
            share = (top_weights * (top_experts == index)).sum(dim=-1, keepdim=True)
            inner = nn.functional.silu(flat @ experts.w1[mine].t()) * (flat @ experts.v1[mine].t())
            out += inner @ experts.w2[mine] * share
        return out.view(rows, cols, width)


class DbrxBlock(nn.Module):
    def __init__(self, config, infer_config, block_idx):
        super().__init__()
        self.norm_attn_norm = DbrxNormAttentionNorm(config, infer_config, block_idx)
        self.ffn = DbrxFFN(config)

    def forward(self, hidden_states, step):
        resid_states, hidden_states = self.norm_attn_norm(hidden_states, step)
        return resid_states + self.ffn(hidden_states)


class DbrxModel(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([DbrxBlock(config, infer_config, idx) for idx in range(config.n_layers)])
        self.norm_f = nn.LayerNorm(config.d_model, bias=False)
        self.head_dim = config.d_model // config.n_heads
        self.theta = config.attn_config["rope_theta"]

    def rope(self, position_ids):
        exponent = torch.arange(0, self.head_dim, 2, device=position_ids.device).float() / self.head_dim
        angle = position_ids[..., None].float() / self.theta**exponent
        angle = torch.cat((angle, angle), dim=-1).unsqueeze(2)
        return angle.cos(), angle.sin()

    def forward(self, input_ids, position_ids, meta):
        if meta.is_prefill:
            write_index = torch.zeros(input_ids.shape[0], dtype=torch.int64, device=input_ids.device)
        else:
            write_index = meta.kv_len
        step = StepInputs(rope=self.rope(position_ids), write_index=write_index, meta=meta)
        hidden_states = self.wte(input_ids)
        for block in self.blocks:
            hidden_states = block(hidden_states, step)
        return self.norm_f(hidden_states)


class DbrxForCausalLM(nn.Module):
    def __init__(self, config: DbrxConfig, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.transformer = DbrxModel(config, infer_config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        batch_size = self.infer_config.scheduler_config.batch_size_per_dp_rank
        input_ids = torch.reshape(input_ids, (batch_size, -1))
        position_ids = torch.reshape(position_ids, (batch_size, -1))
        outputs = self.transformer(input_ids, position_ids, forward_metadata)
        logits = self.lm_head(outputs[:, [-1]])
        return logits.float()

    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        for name, loaded_weight in weights:
            default_weight_loader(params_dict[name], loaded_weight)
        return set(params_dict)
