# ruff: noqa  (framework style on purpose)
"""Dense model with multi-head latent attention over a block pool that the model manages itself."""
import math

import torch
import torch.nn.functional as F
import torch_npu
from executor.core.config import InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData
from torch import nn

from .configuration_mla_blocks import BlocksConfig

BLOCK = 16


def aligned_length(infer_config):
    length = infer_config.data_config.input_truncated_len + infer_config.scheduler_config.max_new_tokens
    return (length + BLOCK - 1) // BLOCK * BLOCK


class BlocksNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x):
        return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]


def get_mscale(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_tables(config, position_ids, dtype):
    """cos, sin [B, S, rope]"""
    yarn, dim, base = config.stretch, config.qk_rope_head_dim, config.rope_theta
    freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))

    def bound(turns):
        span = yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(base))

    low, high = max(math.floor(bound(yarn["beta_fast"])), 0), min(math.ceil(bound(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float) - low) / max(high - low, 0.001)).clamp(0, 1)
    freq = (freq / yarn["factor"] * ramp + freq * (1 - ramp)).to(position_ids.device)
    angles = position_ids[..., None].float() * freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class BlocksAttention(nn.Module):
    def __init__(self, config: BlocksConfig, infer_config: InferenceConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.v_dim = config.v_head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * (self.nope_dim + self.rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = BlocksNorm(self.kv_lora_rank)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_dim, config.hidden_size, bias=False)
        mscale = get_mscale(config.stretch["factor"], config.stretch["mscale_all_dim"])
        self.softmax_scale = (self.nope_dim + self.rope_dim) ** -0.5 * mscale * mscale

        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        blocks_per_row = aligned_length(infer_config) // BLOCK
        self.block_table = torch.arange(0, self.batch_size * blocks_per_row).reshape(self.batch_size, -1)
        self.block_table = self.block_table.to(torch.int32)
        self.nope_cache = torch.Tensor([])
        self.rope_cache = torch.Tensor([])

    def forward(self, hidden_states, cos_sin, slot_mapping, forward_metadata):
        bsz, q_len, _ = hidden_states.shape
        cos, sin = cos_sin
        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.nope_dim + self.rope_dim)
        q_nope, q_pe = torch.split(q, [self.nope_dim, self.rope_dim], dim=-1)
        q_pe = torch_npu.npu_interleave_rope(
            q_pe.transpose(1, 2),
            cos.view(bsz, 1, q_len, self.rope_dim),
            sin.view(bsz, 1, q_len, self.rope_dim),
        ).transpose(1, 2)

        latent_cache = self.kv_a_proj_with_mqa(hidden_states)
        k_rope, k_nope = torch_npu.npu_kv_rmsnorm_rope_cache_v2(
            latent_cache.view(bsz * q_len, 1, 1, self.kv_lora_rank + self.rope_dim),
            self.kv_a_layernorm.weight,
            cos.view(bsz * q_len, 1, 1, self.rope_dim),
            sin.view(bsz * q_len, 1, 1, self.rope_dim),
            slot_mapping.view(-1),
            self.rope_cache,
            self.nope_cache,
            epsilon=self.kv_a_layernorm.variance_epsilon,
            cache_mode="PA_NZ",
            is_output_kv=True,
        )
        if forward_metadata.is_prefill:
            kv = self.kv_b_proj(k_nope.view(bsz * q_len, self.kv_lora_rank))
            kv = kv.view(bsz * q_len, self.num_heads, self.nope_dim + self.v_dim).transpose(0, 1)
            key, value = torch.split(kv, [self.nope_dim, self.v_dim], dim=-1)
            attn_output, _ = torch.ops.npu.npu_fused_infer_attention_score(
                q_nope.flatten(0, 1).transpose(0, 1).contiguous(), key.contiguous(), value.contiguous(),
                query_rope=q_pe.flatten(0, 1).transpose(0, 1).contiguous(),
                key_rope=k_rope.view(1, -1, self.rope_dim).repeat(self.num_heads, 1, 1),
                num_heads=self.num_heads,
                num_key_value_heads=self.num_heads,
                input_layout="NTD_TND",
                atten_mask=forward_metadata.attention_mask, sparse_mode=3,
                actual_seq_lengths=forward_metadata.actual_seq_lengths_cu_q,
                actual_seq_lengths_kv=forward_metadata.actual_seq_lengths_cu_q,
                scale=self.softmax_scale,
            )
        else:
            weight = self.kv_b_proj.weight.view(self.num_heads, self.nope_dim + self.v_dim, self.kv_lora_rank)
            w_uk, w_uv = torch.split(weight, [self.nope_dim, self.v_dim], dim=1)
            query = torch.matmul(q_nope.flatten(0, 1).transpose(0, 1), w_uk).transpose(0, 1)
            blocks = self.nope_cache.shape[0]
            nope = self.nope_cache.view(blocks, 1, self.kv_lora_rank // 16, BLOCK, 16)
            rope = self.rope_cache.view(blocks, 1, self.rope_dim // 16, BLOCK, 16)
            attn_output, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
                query.contiguous(), nope, nope,
                query_rope=q_pe.flatten(0, 1).contiguous(), key_rope=rope,
                num_query_heads=self.num_heads,
                num_key_value_heads=1,
                softmax_scale=self.softmax_scale,
                input_layout="TND_NTD",
                sparse_mode=0,
                atten_mask=None,
                actual_seq_qlen=forward_metadata.actual_seq_lengths_cu_q,
                actual_seq_kvlen=forward_metadata.actual_seq_lengths_kv,
                block_table=self.block_table[:bsz],
                block_size=BLOCK,
            )
            attn_output = torch.matmul(attn_output, w_uv.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(attn_output.reshape(bsz, q_len, self.num_heads * self.v_dim))


class BlocksMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlocksLayer(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.self_attn = BlocksAttention(config, infer_config)
        self.mlp = BlocksMLP(config)
        self.input_layernorm = BlocksNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = BlocksNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos_sin, slot_mapping, forward_metadata):
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, slot_mapping, forward_metadata)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlocksModel(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.config = config
        self.pa_max_length = aligned_length(infer_config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([BlocksLayer(config, infer_config) for _ in range(config.num_hidden_layers)])
        self.norm = BlocksNorm(config.hidden_size, config.rms_norm_eps)

    def get_slot_mapping(self, position_ids):
        """A row has pa_max_length slots of its own."""
        bsz = position_ids.shape[0]
        offset = torch.arange(0, bsz, device=position_ids.device).view(-1, 1) * self.pa_max_length
        return (position_ids + offset).view(-1)

    def forward(self, input_ids, position_ids, forward_metadata):
        x = self.embed_tokens(input_ids)
        cos_sin = rope_tables(self.config, position_ids, x.dtype)
        slot_mapping = self.get_slot_mapping(position_ids)
        for layer in self.layers:
            x = layer(x, cos_sin, slot_mapping, forward_metadata)
        return self.norm(x)


class BlocksForCausalLM(nn.Module):
    def __init__(self, config: BlocksConfig, infer_config: InferenceConfig, comm_manager=None, prefix=""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.model = BlocksModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_cache(self, device):
        rows = self.infer_config.scheduler_config.batch_size_per_dp_rank
        count = rows * (aligned_length(self.infer_config) // BLOCK)
        dtype = self.lm_head.weight.dtype
        for layer in self.model.layers:
            attn = layer.self_attn
            attn.nope_cache = torch.zeros((count, BLOCK, 1, attn.kv_lora_rank), dtype=dtype, device=device)
            attn.rope_cache = torch.zeros((count, BLOCK, 1, attn.rope_dim), dtype=dtype, device=device)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz = forward_metadata.actual_seq_lengths_q.shape[0]
        x = self.model(input_ids.view(bsz, -1), position_ids.view(bsz, -1), forward_metadata)
        if forward_metadata.is_prefill:
            rows = torch.arange(bsz, device=x.device)
            x = x[rows, forward_metadata.actual_seq_lengths_q - 1].unsqueeze(1)
        return self.lm_head(x).float()

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, weight in weights:
            default_weight_loader(params[name], weight)
        return set(params)
