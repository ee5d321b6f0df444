# coding=utf-8
# Vendored from the Hugging Face Qwen3 modeling file and cut down for NPU inference.
# KV cache: Legacy（框架按 cache_unit 静态分配 k_cache / v_cache）

from typing import Iterable, Optional, Set, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch_npu import scatter_update_

from executor.core.config import InferenceConfig, CommManager
from executor.utils.forward_metadata import ForwardMetaData
from executor.model_loader.weight_utils import default_weight_loader
from .configuration_qwen3 import Qwen3Config


class Qwen3RMSNorm(nn.Module):
    """RMSNorm；传入 residual 时先做残差相加，返回 (normed, 新的 residual)"""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def _norm(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)

    def forward(self, x, *args):
        if len(args) == 0:
            return self._norm(x)
        skip = args[0]
        if skip is not None:
            x = x + skip
        return self._norm(x), x


class RotaryTable(nn.Module):
    """cos/sin 预计算表，按 position_ids 取行。"""

    def __init__(self, head_dim, base, max_len):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))
        angles = torch.arange(max_len).float()[:, None] * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        self.register_buffer('cos_cached', angles.cos(), persistent=False)
        self.register_buffer('sin_cached', angles.sin(), persistent=False)

    def forward(self, pos, dtype):
        flat = pos.reshape(-1)
        cos = self.cos_cached.index_select(0, flat).view(*pos.shape, 1, -1)
        sin = self.sin_cached.index_select(0, flat).view(*pos.shape, 1, -1)
        return cos.to(dtype), sin.to(dtype)


def apply_rope(x, cos_sin):
    """x: [B, S, N, D]; cos, sin: [B, S, 1, D]"""
    cos, sin = cos_sin
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Qwen3MLP(nn.Module):
    def __init__(self, config, infer_config, comm_manager):
        super().__init__()
        self.tp = infer_config.parallel_config.attn_tp_size
        self.comm_manager = comm_manager
        self.inter = config.intermediate_size // self.tp
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * self.inter, bias=False)
        self.down_proj = nn.Linear(self.inter, config.hidden_size, bias=False)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).split(self.inter, dim=-1)
        y = self.down_proj(silu(gate) * up)
        if self.tp > 1:
            dist.all_reduce(y, group=self.comm_manager.get_group('attn_tp_group'))
        return y


class Qwen3Attention(nn.Module):
    def __init__(self, config: Qwen3Config, infer_config: InferenceConfig,
                 comm_manager: CommManager, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.comm_manager = comm_manager
        self.tp = infer_config.parallel_config.attn_tp_size
        self.hidden_size = config.hidden_size
        self.head_dim = config.head_dim
        self.n_q = config.num_attention_heads // self.tp
        self.n_kv = max(config.num_key_value_heads // self.tp, 1)
        self.softmax_scale = 1.0 / (self.head_dim ** 0.5)

        self.qkv_proj = nn.Linear(self.hidden_size, (self.n_q + 2 * self.n_kv) * self.head_dim,
                                  bias=config.attention_bias)
        self.o_proj = nn.Linear(self.n_q * self.head_dim, self.hidden_size, bias=False)
        # unlike olmo, only on the head dim!
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

        # 占位，框架在 init_kvcache 时分配 [B, S_max, Nkv, D]
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.n_kv, self.head_dim)

    def forward(self, x: torch.Tensor, cos_sin, forward_metadata: ForwardMetaData):
        # BSND shim（与 Qwen3Model 入口处相同）
        bs = forward_metadata.actual_seq_lengths_q.shape[0]
        x = x.view(bs, -1, self.hidden_size)
        q_len = x.shape[1]

        # prefill 的 kv_len 是 packed 的平铺 slot，不能直接当作写入起点
        if forward_metadata.is_prefill:
            start = torch.zeros(bs, dtype=torch.int64, device=x.device)
        else:
            start = forward_metadata.kv_len

        qkv = self.qkv_proj(x)
        q, k, v = qkv.split([self.n_q * self.head_dim,
                             self.n_kv * self.head_dim,
                             self.n_kv * self.head_dim], dim=2)
        q = self.q_norm(q.reshape(bs, q_len, self.n_q, self.head_dim))
        k = self.k_norm(k.reshape(bs, q_len, self.n_kv, self.head_dim))
        v = v.reshape(bs, q_len, self.n_kv, self.head_dim)
        q, k = apply_rope(q, cos_sin), apply_rope(k, cos_sin)

        past_k, past_v = self.k_cache, self.v_cache
        if not (past_k.numel() and past_v.numel()):
            raise RuntimeError('KV cache is not initialized')
        scatter_update_(past_k, start, k, 1)
        scatter_update_(past_v, start, v, 1)

        keep = None
        if not forward_metadata.is_prefill:
            total = int(start.max().item()) + 1
            k, v = past_k[:, :total], past_v[:, :total]
            # [B, 1, 1, total]，每行只看到自己已写入的部分
            keep = (torch.arange(total, device=x.device)[None, :] <= start[:, None])[:, None, None, :]
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=keep, is_causal=keep is None, scale=self.softmax_scale, enable_gqa=True)

        out = out.transpose(1, 2).reshape(bs, q_len, self.n_q * self.head_dim)
        out = self.o_proj(out)
        if self.tp > 1:
            dist.all_reduce(out, group=self.comm_manager.get_group('attn_tp_group'))
        return out


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config, infer_config, comm_manager, layer_idx):
        super().__init__()
        self.self_attn = Qwen3Attention(config, infer_config, comm_manager, layer_idx)
        self.mlp = Qwen3MLP(config, infer_config, comm_manager)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, skip, cos_sin, forward_metadata):
        x, skip = self.input_layernorm(x, skip)
        x = self.self_attn(x, cos_sin, forward_metadata)
        x, skip = self.post_attention_layernorm(x, skip)
        return self.mlp(x), skip


class Qwen3Model(nn.Module):
    def __init__(self, config, infer_config, comm_manager):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([
            Qwen3DecoderLayer(config, infer_config, comm_manager, i)
            for i in range(config.num_hidden_layers)
        ])
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Legacy 下 cache 长度即最大位置数
        table_len = infer_config.data_config.input_truncated_len + \
            infer_config.scheduler_config.max_new_tokens
        self.rotary = RotaryTable(config.head_dim, config.rope_theta, table_len)

    def forward(self, input_ids, position_ids, forward_metadata):
        # BSND shim: packed 1-D -> [B, S]，仅等长 batch 适用
        bs = forward_metadata.actual_seq_lengths_q.shape[0]
        input_ids = input_ids.view(bs, -1)
        position_ids = position_ids.view(bs, -1)

        x = self.embed_tokens(input_ids)
        cos_sin = self.rotary(position_ids, x.dtype)
        skip = None
        for layer in self.layers:
            x, skip = layer(x, skip, cos_sin, forward_metadata)
        x, _ = self.norm(x, skip)

        if x.size(1) > 1:
            # 每条 prompt 只取最后一个 token
            last = position_ids.max(dim=-1).values
            last = last[:, None, None].expand(-1, 1, x.shape[-1])
            x = torch.gather(x, 1, last)
        return x


class Qwen3ForCausalLM(nn.Module):
    def __init__(self, config: Qwen3Config, infer_config: InferenceConfig,
                 comm_manager: CommManager = None, prefix: str = ''):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.attn_dp_size = infer_config.parallel_config.attn_dp_size
        self.init_parallel_comm_group()
        self.model = Qwen3Model(config, infer_config, comm_manager)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def init_parallel_comm_group(self):
        # 新版 executor 由模型注册通信组，旧版由 CommManager 预先创建
        if self.comm_manager is not None and hasattr(self.comm_manager, 'register_group'):
            self.comm_manager.register_group(
                name='attn_tp_group', group_num=self.attn_dp_size, group_size=self.attn_tp_size)

    def forward(self, input_ids: torch.LongTensor, position_ids: Optional[torch.LongTensor] = None,
                forward_metadata: ForwardMetaData = None, **kwargs):
        x = self.model(input_ids, position_ids, forward_metadata)
        return self.lm_head(x).float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        # (融合后的参数名, checkpoint 中的名字, 片段序号)
        stacked = [
            ('qkv_proj', 'q_proj', 0), ('qkv_proj', 'k_proj', 1), ('qkv_proj', 'v_proj', 2),
            ('gate_up_proj', 'gate_proj', 0), ('gate_up_proj', 'up_proj', 1),
        ]
        cfg, tp = self.config, self.attn_tp_size
        rank = self.infer_config.parallel_config.global_rank % tp
        params = dict(self.named_parameters())
        loaded = set()

        n_q, n_kv = cfg.num_attention_heads // tp, max(cfg.num_key_value_heads // tp, 1)
        sizes = {
            'qkv_proj': [n_q * cfg.head_dim, n_kv * cfg.head_dim, n_kv * cfg.head_dim],
            'gate_up_proj': [cfg.intermediate_size // tp] * 2,
        }
        for name, w in weights:
            if cfg.tie_word_embeddings and name.startswith('lm_head.'):
                continue
            for fused, shard, idx in stacked:
                if f'.{shard}.' not in name:
                    continue
                name = name.replace(shard, fused)
                size, offset = sizes[fused][idx], sum(sizes[fused][:idx])
                pieces = w.shape[0] // size  # KV 头少于卡数时多张卡持有同一个头
                w = w.narrow(0, rank * pieces // tp * size, size)
                params[name].data.narrow(0, offset, size).copy_(w)
                break
            else:
                if name not in params:
                    continue
                if name.endswith('o_proj.weight') or name.endswith('down_proj.weight'):
                    w = w.chunk(tp, dim=1)[rank]
                default_weight_loader(params[name], w)
            loaded.add(name)
        return loaded
