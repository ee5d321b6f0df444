"""tiny_moe2d on the framework of the padded era: input_ids are [batch, seq], the KV cache is contiguous."""

from typing import Iterable, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch_npu

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData
from module.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

from .configuration_tiny_moe2d import TinyMoe2dConfig


class TinyMoe2dRMSNorm(nn.Module):
    """RMS norm; with a second argument, the residual is added first and handed back."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, *args):
        if not args:
            return torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]
        residual = args[0]
        if residual is None:
            normed = torch_npu.npu_rms_norm(hidden_states, self.weight, self.variance_epsilon)[0]
            return normed, hidden_states
        normed, _, added = torch_npu.npu_add_rms_norm(residual, hidden_states, self.weight, self.variance_epsilon)
        return normed, added


class TinyMoe2dRotaryEmbedding(nn.Module):
    """cos/sin tables of the whole context; prefill takes the first rows, decode the row of each request."""

    def __init__(self, config: TinyMoe2dConfig):
        super().__init__()
        self.dim = config.head_dim
        self.base = config.rope_theta
        self.build_table(config.max_position_embeddings, torch.get_default_dtype())

    def build_table(self, length, dtype):
        self.max_seq_len_cached = length
        inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim))
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq)
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_cached", table.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", table.sin().to(dtype), persistent=False)

    def forward(self, x, seq_len, kv_len, max_seq_len=None):
        batch_size, _, _ = x.size()
        if seq_len == 1:
            cos = torch.index_select(self.cos_cached, dim=0, index=kv_len).unsqueeze(1).unsqueeze(1)
            sin = torch.index_select(self.sin_cached, dim=0, index=kv_len).unsqueeze(1).unsqueeze(1)
        else:
            cos = self.cos_cached[:seq_len].unsqueeze(0).unsqueeze(2).repeat(batch_size, 1, 1, 1)
            sin = self.sin_cached[:seq_len].unsqueeze(0).unsqueeze(2).repeat(batch_size, 1, 1, 1)
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class TinyMoe2dSparseMoeBlock(nn.Module):
    """Top-k experts. Rank r of the moe_tp group holds slice r of every expert."""

    def __init__(self, config: TinyMoe2dConfig, infer_config: InferenceConfig, comm_manager: CommManager):
        super().__init__()
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.hidden_dim = config.hidden_size
        self.comm_manager = comm_manager
        self.moe_tp_size = infer_config.parallel_config.moe_tp_size
        self.moe_tp_rank = comm_manager.get_rank("moe_tp_group") if self.moe_tp_size > 1 else 0
        self.intermediate_size_per_rank = config.moe_intermediate_size // self.moe_tp_size
        self.input_len = infer_config.scheduler_config.input_max_len
        self.gate = ReplicatedLinear(config.hidden_size, self.num_experts, params_dtype=torch.float32)
        width = self.intermediate_size_per_rank
        self.w13_weight = nn.Parameter(torch.empty(self.num_experts, 2 * width, self.hidden_dim), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, width), requires_grad=False)

    def load_expert(self, index, kind, tensor):
        """Copy this rank's slice of one checkpoint matrix of one expert."""
        width = self.intermediate_size_per_rank
        dim = 1 if kind == "down_proj" else 0
        mine = tensor.narrow(dim, self.moe_tp_rank * width, width)
        if kind == "down_proj":
            self.w2_weight.data[index].copy_(mine)
        else:
            start = 0 if kind == "gate_proj" else width
            self.w13_weight.data[index, start : start + width].copy_(mine)

    def forward_gate(self, hidden_states):
        bsz, seq_len, _ = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        scores = F.softmax(self.gate(hidden_states), dim=-1, dtype=torch.float32)
        topk_weight, topk_idx = torch.topk(scores, self.top_k, dim=-1)
        if self.norm_topk_prob:
            topk_weight = topk_weight / topk_weight.sum(dim=-1, keepdim=True)
        return topk_idx, topk_weight

    def forward(self, hidden_states, cur_topk_list=None, **kwargs):
        topk_idx, topk_weight = self.forward_gate(hidden_states)
        if cur_topk_list is not None:
            topk_idx = cur_topk_list.to(torch.int64)
        return self.moe_infer(hidden_states, topk_idx, topk_weight)

    def moe_infer(self, hidden_states, topk_idx, topk_weight):
        batch_size, sequence_length, h = hidden_states.shape
        hidden_states = hidden_states.view(-1, h)
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(topk_idx == expert)
            if token.numel() == 0:
                continue
            gate, up = F.linear(hidden_states[token], self.w13_weight[expert]).chunk(2, dim=-1)
            expert_out = F.linear(F.silu(gate) * up, self.w2_weight[expert])
            weighted = expert_out * topk_weight[token, place].unsqueeze(-1).to(expert_out.dtype)
            output.index_add_(0, token, weighted)
        if self.moe_tp_size > 1:
            dist.all_reduce(output, group=self.comm_manager.get_group("moe_tp_group"))
        return output.view(batch_size, sequence_length, h)


class TinyMoe2dAttention(nn.Module):
    def __init__(
        self,
        config: TinyMoe2dConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager,
        layer_idx: Optional[int] = None,
        prefix: str = "",
    ):
        super().__init__()
        self.layer_idx = layer_idx
        self.comm_manager = comm_manager
        self.attn_tp_size = infer_config.parallel_config.attn_tp_size
        self.num_heads = config.num_attention_heads
        self.num_heads_per_rank = self.num_heads // self.attn_tp_size
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_heads_per_rank = max(self.num_key_value_heads // self.attn_tp_size, 1)
        self.head_dim = config.head_dim
        self.scale_fa = 1 / (self.head_dim**0.5)
        tp_rank = comm_manager.get_rank("attn_tp_group")
        self.merged_qkv_proj = QKVParallelLinear(
            hidden_size=config.hidden_size,
            head_size=self.head_dim,
            total_num_heads=self.num_heads,
            total_num_kv_heads=self.num_key_value_heads,
            tp_size=self.attn_tp_size,
            tp_rank=tp_rank,
            prefix=f"{prefix}.merged_qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            self.num_heads * self.head_dim, config.hidden_size, tp_size=self.attn_tp_size, tp_rank=tp_rank
        )
        self.q_norm = TinyMoe2dRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = TinyMoe2dRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_cache = self.v_cache = torch.Tensor([])
        self.cache_unit = (self.head_dim * self.num_key_value_heads_per_rank,)

    def exec_qkv(
        self,
        qkv: torch.Tensor,
        cos_sin: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ):
        bsz, q_len, _ = qkv.size()
        kv_size = self.num_key_value_heads_per_rank * self.head_dim
        query_states, key_states, value_states = qkv.split(
            (self.num_heads_per_rank * self.head_dim, kv_size, kv_size), dim=2
        )
        # Normalise per head, rotate, fold the heads back into the last dim.
        query_shape = (bsz, q_len, self.num_heads_per_rank, self.head_dim)
        key_shape = (bsz, q_len, self.num_key_value_heads_per_rank, self.head_dim)
        query_states = self.q_norm(query_states.view(query_shape).contiguous())
        key_states = self.k_norm(key_states.view(key_shape).contiguous())
        cos, sin = cos_sin
        query_states, key_states = torch_npu.npu_apply_rotary_pos_emb(query_states, key_states, cos, sin, layout="BSND")
        query_states = query_states.view(bsz, q_len, -1)
        key_states = key_states.view(bsz, q_len, -1)

        k_cache, v_cache = self.k_cache, self.v_cache
        if not k_cache.numel() or not v_cache.numel():
            raise RuntimeError("the KV cache was not allocated")
        kv_len = forward_metadata.kv_len
        torch_npu.scatter_update_(k_cache, kv_len, key_states, -2)
        torch_npu.scatter_update_(v_cache, kv_len, value_states, -2)

        if forward_metadata.is_prefill:
            attn_output, _ = torch_npu.npu_fused_infer_attention_score(
                query_states,
                key_states,
                value_states,
                num_heads=self.num_heads_per_rank,
                num_key_value_heads=self.num_key_value_heads_per_rank,
                scale=self.scale_fa,
                input_layout="BSH",
                sparse_mode=3,
                atten_mask=forward_metadata.attention_mask,
            )
        else:
            attn_output, _ = torch_npu.npu_fused_infer_attention_score(
                query_states,
                k_cache,
                v_cache,
                num_heads=self.num_heads_per_rank,
                num_key_value_heads=self.num_key_value_heads_per_rank,
                scale=self.scale_fa,
                input_layout="BSH",
                sparse_mode=0,
                atten_mask=None,
                actual_seq_lengths_kv=forward_metadata.actual_seq_lengths_kv,
            )
        attn_output = attn_output.reshape(bsz, q_len, self.num_heads_per_rank * self.head_dim)
        attn_output = self.o_proj(attn_output)
        if self.attn_tp_size > 1:
            dist.all_reduce(attn_output, group=self.comm_manager.get_group("attn_tp_group"))
        return attn_output

    def forward(self, hidden_states, cos_sin=None, forward_metadata: ForwardMetaData = None, **kwargs):
        bsz, q_len, h = hidden_states.size()
        qkv = self.merged_qkv_proj(hidden_states)
        return self.exec_qkv(qkv=qkv, cos_sin=cos_sin, forward_metadata=forward_metadata)


class TinyMoe2dDecoderLayer(nn.Module):
    def __init__(self, config, infer_config, comm_manager, layer_idx: int, prefix: str = ""):
        super().__init__()
        self.self_attn = TinyMoe2dAttention(
            config, infer_config, comm_manager, layer_idx=layer_idx, prefix=f"{prefix}.self_attn"
        )
        self.mlp = TinyMoe2dSparseMoeBlock(config, infer_config, comm_manager)
        self.input_layernorm = TinyMoe2dRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = TinyMoe2dRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, cos_sin, past_residual=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states, residual = self.input_layernorm(hidden_states, past_residual)
        hidden_states = self.self_attn(
            hidden_states=hidden_states, cos_sin=cos_sin, forward_metadata=forward_metadata, **kwargs
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states, **kwargs)
        return (residual, hidden_states)


class TinyMoe2dModel(nn.Module):
    def __init__(self, config, infer_config: InferenceConfig, comm_manager: CommManager, prefix: str = ""):
        super().__init__()
        self.comm_manager = comm_manager
        self.max_position_embeddings = config.max_position_embeddings
        self.embed_tp_size = infer_config.parallel_config.embed_tp_size
        self.embed_tp_rank = comm_manager.get_rank("embed_tp_group")
        self.vocab_size_per_rank = config.vocab_size // self.embed_tp_size
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp_size=self.embed_tp_size, tp_rank=self.embed_tp_rank
        )
        self.layers = nn.ModuleList(
            [
                TinyMoe2dDecoderLayer(config, infer_config, comm_manager, layer_idx, prefix=f"model.layers.{layer_idx}")
                for layer_idx in range(config.num_hidden_layers)
            ]
        )
        self.norm = TinyMoe2dRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = TinyMoe2dRotaryEmbedding(config)

    def embed(self, input_ids):
        if self.embed_tp_size == 1:
            return self.embed_tokens(input_ids)
        local = input_ids - self.embed_tp_rank * self.vocab_size_per_rank
        mine = (local >= 0) & (local < self.vocab_size_per_rank)
        embeds = self.embed_tokens(local * mine) * mine.unsqueeze(-1)
        dist.all_reduce(embeds, group=self.comm_manager.get_group("embed_tp_group"))
        return embeds

    def forward(self, input_ids, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        batch_size, seq_length = input_ids.shape
        position_ids = position_ids.view(-1, seq_length).long()
        hidden_states = self.embed(input_ids)
        kv_len = forward_metadata.kv_len
        cos_sin = self.rotary_emb(hidden_states, seq_length, kv_len, self.max_position_embeddings)
        residual = None
        for decoder_layer in self.layers:
            residual, hidden_states = decoder_layer(
                hidden_states,
                cos_sin=cos_sin,
                past_residual=residual,
                forward_metadata=forward_metadata,
                **kwargs,
            )
        hidden_states, _ = self.norm(hidden_states, residual)

        # Prompts are padded on the right: the last real token has the largest position.
        if hidden_states.size()[1] > 1:
            gather_index, _ = torch.max(position_ids, dim=-1)
            gather_index = gather_index.unsqueeze(1).unsqueeze(2).repeat(1, 1, hidden_states.shape[-1])
            hidden_states = torch.gather(hidden_states, 1, gather_index)
        return hidden_states


class TinyMoe2dForCausalLM(nn.Module):
    def __init__(self, config, infer_config: InferenceConfig, comm_manager: CommManager, prefix: str = ""):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.comm_manager = comm_manager
        self.input_max_len = infer_config.scheduler_config.input_max_len
        self.lmhead_tp_size = infer_config.parallel_config.lmhead_tp_size
        self.model = TinyMoe2dModel(config, infer_config, comm_manager, prefix)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            tp_size=self.lmhead_tp_size,
            tp_rank=comm_manager.get_rank("lmhead_tp_group"),
        )

    def forward(self, input_ids=None, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        hidden_states = self.model(
            input_ids=input_ids, position_ids=position_ids, forward_metadata=forward_metadata, **kwargs
        )
        logits = self.lm_head(hidden_states)
        if self.lmhead_tp_size > 1:
            parts = [torch.empty_like(logits) for _ in range(self.lmhead_tp_size)]
            dist.all_gather(parts, logits, group=self.comm_manager.get_group("lmhead_tp_group"))
            logits = torch.cat(parts, dim=-1)
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> set:
        params_dict = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if ".mlp.experts." in name:
                layer, _, rest = name.partition(".mlp.experts.")
                index, kind, _ = rest.split(".")
                self.get_submodule(f"{layer}.mlp").load_expert(int(index), kind, tensor)
                loaded |= {f"{layer}.mlp.w13_weight", f"{layer}.mlp.w2_weight"}
                continue
            shard = None
            for letter in "qkv":
                if f".self_attn.{letter}_proj." in name:
                    name, shard = name.replace(f"{letter}_proj", "merged_qkv_proj"), letter
            if name not in params_dict:
                continue
            param = params_dict[name]
            loader = getattr(param, "weight_loader", default_weight_loader)
            loader(param, tensor) if shard is None else loader(param, tensor, shard)
            loaded.add(name)
        return loaded
