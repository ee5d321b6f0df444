"""dots.llm1 on NPU: prompt flash attention for prefill, incremental flash attention for decode."""
import torch
import torch_npu
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_dots1 import Dots1Config


class DotsNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x, residual=None):
        if residual is None:
            return torch_npu.npu_rms_norm(x, self.weight, self.eps)[0]
        y, _, summed = torch_npu.npu_add_rms_norm(x, residual, self.weight, self.eps)
        return y, summed


class DotsAttention(nn.Module):
    def __init__(self, config: Dots1Config, infer_config: InferenceConfig):
        super().__init__()
        self.tp = infer_config.parallel_config.attn_tp_size
        self.head_num = config.num_attention_heads // self.tp
        self.kv_head_num = max(config.num_key_value_heads // self.tp, 1)
        self.head_dim = config.head_dim
        self.scale_value = 1.0 / self.head_dim ** 0.5
        self.qkv_proj = nn.Linear(
            config.hidden_size, (self.head_num + 2 * self.kv_head_num) * self.head_dim, bias=config.attention_bias
        )
        self.o_proj = nn.Linear(self.head_num * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DotsNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = DotsNorm(self.head_dim, config.rms_norm_eps)
        self.k_cache = torch.Tensor([])
        self.v_cache = torch.Tensor([])
        self.cache_unit = (self.kv_head_num * self.head_dim,)

    def forward(self, hidden, cos, sin, kv_len, mask, actual_lengths, prefill):
        bsz, length, _ = hidden.shape
        qkv = self.qkv_proj(hidden)
        q, k, v = qkv.split(
            [self.head_num * self.head_dim, self.kv_head_num * self.head_dim, self.kv_head_num * self.head_dim], dim=2
        )
        q = self.q_norm(q.reshape(bsz, length, self.head_num, self.head_dim))
        k = self.k_norm(k.reshape(bsz, length, self.kv_head_num, self.head_dim))
        q = torch_npu.npu_rotary_mul(q, cos, sin).reshape(bsz, length, -1)
        k = torch_npu.npu_rotary_mul(k, cos, sin).reshape(bsz, length, -1)
        torch_npu.scatter_update_(self.k_cache, kv_len, k, 1)
        torch_npu.scatter_update_(self.v_cache, kv_len, v.contiguous(), 1)
        if prefill:
            out = torch_npu.npu_prompt_flash_attention(
                q, k, v.contiguous(), num_heads=self.head_num, num_key_value_heads=self.kv_head_num,
                input_layout="BSH", scale_value=self.scale_value, atten_mask=mask, sparse_mode=3,
                next_tokens=0,
            )
        else:
            out = torch_npu.npu_incre_flash_attention(
                q, self.k_cache, self.v_cache, num_heads=self.head_num, num_key_value_heads=self.kv_head_num,
                input_layout="BSH", scale_value=self.scale_value, actual_seq_lengths=actual_lengths,
            )
        return self.o_proj(out)


class DotsMLP(nn.Module):
    def __init__(self, config, inner):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(torch_npu.npu_swiglu(self.gate_up_proj(x)))


class DotsMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.normalise = config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.register_buffer("correction", torch.zeros(config.n_routed_experts))
        self.experts = nn.ModuleList(
            [DotsMLP(config, config.moe_intermediate_size) for _ in range(config.n_routed_experts)]
        )
        self.shared_experts = DotsMLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden):
        shape = hidden.shape
        flat = hidden.view(-1, shape[-1])
        scores = self.gate(flat.float()).sigmoid()
        _, chosen = torch.topk(scores + self.correction, self.top_k, dim=-1)
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.factor
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + expert(flat) * share.to(flat.dtype)
        return (out + self.shared_experts(flat)).view(shape)


class DotsLayer(nn.Module):
    def __init__(self, config, infer_config, number):
        super().__init__()
        self.self_attn = DotsAttention(config, infer_config)
        sparse = number >= config.first_k_dense_replace
        self.mlp = DotsMoE(config) if sparse else DotsMLP(config, config.intermediate_size)
        self.input_layernorm = DotsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DotsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, residual, hidden, cos, sin, kv_len, mask, actual_lengths, prefill):
        if hidden is None:
            hidden = self.input_layernorm(residual)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, cos, sin, kv_len, mask, actual_lengths, prefill)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return residual, self.mlp(hidden)


class DotsModel(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DotsLayer(config, infer_config, number) for number in range(config.num_hidden_layers)]
        )
        self.norm = DotsNorm(config.hidden_size, config.rms_norm_eps)
        freq = 1.0 / config.rope_base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        table = torch.outer(torch.arange(config.max_position_embeddings).float(), freq)
        table = torch.cat([table, table], dim=-1)
        self.register_buffer("cos_table", table.cos(), persistent=False)
        self.register_buffer("sin_table", table.sin(), persistent=False)

    def forward(self, input_ids, meta: ForwardMetaData):
        bsz, length = input_ids.shape
        prefill = length > 1
        if prefill:
            kv_len = torch.zeros(bsz, dtype=torch.int64, device=input_ids.device)
            cos = self.cos_table[:length].view(1, length, 1, -1).expand(bsz, -1, -1, -1)
            sin = self.sin_table[:length].view(1, length, 1, -1).expand(bsz, -1, -1, -1)
        else:
            kv_len = meta.kv_len
            cos = self.cos_table.index_select(0, kv_len).view(bsz, 1, 1, -1)
            sin = self.sin_table.index_select(0, kv_len).view(bsz, 1, 1, -1)
        residual, hidden = self.embed_tokens(input_ids), None
        for layer in self.layers:
            residual, hidden = layer(
                residual, hidden, cos, sin, kv_len, meta.attention_mask, meta.actual_seq_lengths_kv, prefill
            )
        return self.norm(hidden, residual)[0]


class Dots1ForCausalLM(nn.Module):
    def __init__(self, config: Dots1Config, infer_config: InferenceConfig, comm_manager: CommManager = None,
                 prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.bs = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = DotsModel(config, infer_config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden = self.model(input_ids.view(self.bs, -1), forward_metadata)
        if hidden.shape[1] > 1:
            index = position_ids.view(self.bs, -1).max(dim=-1)[0]
            hidden = torch.gather(hidden, 1, index.view(-1, 1, 1).repeat(1, 1, hidden.shape[-1]))
        return self.lm_head(hidden).float()

    def load_weights(self, weights):
        slots = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        stacked, done = {}, set()
        for name, tensor in weights:
            name = name.replace("gate.e_score_correction_bias", "correction")
            for old, new in (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj"),
                             ("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj")):
                if f".{old}." in name:
                    stacked.setdefault(name.replace(f".{old}.", f".{new}."), {})[old] = tensor
                    break
            else:
                if ".experts." in name and name.rsplit(".", 1)[1] in ("gate_up_proj", "down_proj"):
                    base, part = name.rsplit(".", 1)
                    for i, one in enumerate(tensor):
                        default_weight_loader(slots[f"{base}.{i}.{part}.weight"], one)
                        done.add(f"{base}.{i}.{part}.weight")
                    continue
                default_weight_loader(slots[name], tensor)
                done.add(name)
        for name, parts in stacked.items():
            order = ("q_proj", "k_proj", "v_proj") if "qkv" in name else ("gate_proj", "up_proj")
            default_weight_loader(slots[name], torch.cat([parts[p] for p in order]))
            done.add(name)
        return done
