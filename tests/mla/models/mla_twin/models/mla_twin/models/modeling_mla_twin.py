# ruff: noqa  (framework style on purpose)
"""Latent attention with a method per phase, halves of the up projection in parameters of their own, blocks and slots
that the model manages, and a drafting model of the same class. Padded batches [B, S]."""
import math
from enum import Enum
from operator import attrgetter

import torch
import torch.nn.functional as F
import torch_npu
from executor.core.config import InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData
from torch import nn

from .configuration_mla_twin import TwinConfig

PAGE = 16


class Overlap(Enum):
    OFF = 0
    TWO_STREAMS = 1


def slots_per_row(infer_config):
    length = infer_config.scheduler_config.input_max_len + infer_config.scheduler_config.max_new_tokens
    return (length + PAGE - 1) // PAGE * PAGE


class TwinNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x, *carried):
        if not carried:
            return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        if carried[0] is None:
            return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0], x
        y, _, total = torch_npu.npu_add_rms_norm(carried[0], x, self.weight, self.variance_epsilon)
        return y, total


class TwinRotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        yarn, dim, base = config.stretch, config.qk_rope_head_dim, config.rope_theta
        freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))

        def bound(turns):
            span = yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)
            return dim * math.log(span) / (2 * math.log(base))

        low, high = max(math.floor(bound(yarn["beta_fast"])), 0), min(math.ceil(bound(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float) - low) / max(high - low, 0.001)).clamp(0, 1)
        freq = freq / yarn["factor"] * ramp + freq * (1 - ramp)
        angles = torch.outer(torch.arange(2048, dtype=torch.float), freq)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, x, where, is_prefill=True):
        rows, tokens, _ = x.size()
        if is_prefill:
            cos, sin = [], []
            for length in where:
                cos.append(self.cosines[:length].unsqueeze(1))
                sin.append(self.sines[:length].unsqueeze(1))
            cos, sin = torch.cat(cos, dim=0), torch.cat(sin, dim=0)
        else:
            cos = torch.index_select(self.cosines, dim=0, index=where.view(-1)).unsqueeze(1).unsqueeze(1)
            sin = torch.index_select(self.sines, dim=0, index=where.view(-1)).unsqueeze(1).unsqueeze(1)
        return cos.to(x.dtype), sin.to(x.dtype)


def stretch_factor(scale, amount):
    return 1.0 if scale <= 1 else 0.1 * amount * math.log(scale) + 1.0


class TwinAttention(nn.Module):
    def __init__(self, config: TwinConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.heads = config.num_attention_heads
        self.rank = config.kv_lora_rank
        self.plain, self.turned, self.out_size = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.down_q = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.norm_q = TwinNorm(config.q_lora_rank)
        self.up_q = nn.Linear(config.q_lora_rank, self.heads * (self.plain + self.turned), bias=False)
        self.down_kv = nn.Linear(config.hidden_size, self.rank + self.turned, bias=False)
        self.norm_kv = TwinNorm(self.rank)
        self.up_kv = nn.Linear(self.rank, self.heads * (self.plain + self.out_size), bias=False)
        view = self.up_kv.weight.data.T.view(self.rank, self.heads, self.plain + self.out_size)
        self.pending_k, self.pending_v = view.split([self.plain, self.out_size], dim=-1)
        self.pending_k, self.pending_v = self.pending_k.permute(1, 2, 0), self.pending_v.transpose(0, 1)
        self.o_proj = nn.Linear(self.heads * self.out_size, config.hidden_size, bias=False)
        self.scale = (self.plain + self.turned) ** -0.5
        amount = config.stretch.get("mscale_all_dim", 0)
        if amount:
            self.scale = self.scale * stretch_factor(config.stretch["factor"], amount) ** 2
        rows = infer_config.scheduler_config.batch_size_per_dp_rank
        self.pages = torch.arange(0, rows * (slots_per_row(infer_config) // PAGE)).reshape(rows, -1)
        self.pages = self.pages.to(torch.int32)
        self.nope_cache = torch.Tensor([])
        self.rope_cache = torch.Tensor([])
        self.fold_in = infer_config.model_config.custom_params.get("fold_in", False)

    def prompts(self, hidden_states, cos_sin=None, slots=None, kv_lens=None, q_lens=None, mask=None, positions=None):
        bsz, q_len, _ = hidden_states.size()
        cos, sin = cos_sin
        q = self.up_q(self.norm_q(self.down_q(hidden_states))).view(1, -1, self.heads, self.plain + self.turned)
        q_plain, q_turned = torch.split(q, [self.plain, self.turned], dim=-1)
        cos, sin = cos.view(1, 1, -1, self.turned), sin.view(1, 1, -1, self.turned)
        q_turned = torch_npu.npu_interleave_rope(q_turned.transpose(1, 2), cos, sin)
        q_turned = q_turned.view(1, self.heads, -1, self.turned).transpose(1, 2)
        packed = self.down_kv(hidden_states).view(-1, 1, 1, self.rank + self.turned)
        nope_cache = self.nope_cache
        if not self.nope_cache.numel():
            raise ValueError("no cache")
        k_turned, latent = torch_npu.npu_kv_rmsnorm_rope_cache_v2(
            packed, self.norm_kv.weight, cos.view(-1, 1, 1, self.turned), sin.view(-1, 1, 1, self.turned),
            slots, self.rope_cache, nope_cache,
            epsilon=self.norm_kv.variance_epsilon, cache_mode="PA_NZ", is_output_kv=True,
        )
        keys = torch.matmul(latent.view(1, -1, self.rank), self.half_k.permute(0, 2, 1))
        values = torch.matmul(latent.view(1, -1, self.rank), self.half_v)
        k_turned = k_turned.view(1, -1, self.turned).repeat(self.heads, 1, 1)
        out, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q_plain.flatten(0, 1).permute(1, 0, 2), keys, values,
            query_rope=q_turned.flatten(0, 1).permute(1, 0, 2), key_rope=k_turned,
            num_heads=self.heads, num_key_value_heads=self.heads, input_layout="NTD_TND",
            atten_mask=mask, sparse_mode=3, scale=self.scale,
            actual_seq_lengths=kv_lens, actual_seq_lengths_kv=kv_lens,
        )
        return self.o_proj(out.reshape(bsz, -1, self.heads * self.out_size))

    def steps(self, hidden_states, cos_sin=None, slots=None, kv_lens=None, q_lens=None, mask=None, positions=None):
        bsz, q_len, _ = hidden_states.size()
        cos, sin = cos_sin
        q = self.up_q(self.norm_q(self.down_q(hidden_states)))
        packed = self.down_kv(hidden_states)
        q = q.view(bsz, q_len, self.heads, self.plain + self.turned)
        q_plain, q_turned = torch.split(q, [self.plain, self.turned], dim=-1)
        q_plain = q_plain.view(-1, self.heads, self.plain)
        if self.half_k.shape[0] * self.half_k.shape[1] <= 65535:
            q_plain = torch_npu.npu_transpose_batchmatmul(
                q_plain, self.half_k, bias=None, scale=None,
                perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2),
            )
            q_plain = q_plain.view(bsz, q_len, self.heads, self.rank)
        else:
            q_plain = torch.matmul(q_plain.transpose(0, 1), self.half_k).transpose(0, 1)
            q_plain = q_plain.view(bsz, q_len, self.heads, self.rank)
        cos, sin = cos.view(bsz, 1, -1, self.turned), sin.view(bsz, 1, -1, self.turned)
        q_turned = torch_npu.npu_interleave_rope(q_turned.transpose(1, 2), cos, sin)
        q_turned = q_turned.view(bsz, self.heads, -1, self.turned).transpose(1, 2)
        own_slots = positions.view(-1)
        packed = packed.view(bsz * q_len, 1, 1, self.rank + self.turned)
        cos, sin = cos.view(-1, 1, 1, self.turned), sin.view(-1, 1, 1, self.turned)
        nope_cache, rope_cache = self.nope_cache, self.rope_cache
        pages, _, _, _ = nope_cache.size()
        torch_npu.npu_kv_rmsnorm_rope_cache_v2(
            packed, self.norm_kv.weight, cos, sin, own_slots, rope_cache, nope_cache,
            epsilon=self.norm_kv.variance_epsilon, cache_mode="PA_NZ",
        )
        latents = nope_cache.view(pages, 1, self.rank // 16, PAGE, 16)
        k_turned = rope_cache.view(pages, 1, self.turned // 16, PAGE, 16)
        if q_len > 1:
            mode = 3
        else:
            mode, mask = 0, None
        rows, tokens, heads, _ = q_plain.shape
        q_plain = q_plain.contiguous().view(rows * tokens, heads, -1)
        q_turned = q_turned.contiguous().view(rows * tokens, heads, -1)
        out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
            q_plain, latents, latents, query_rope=q_turned, key_rope=k_turned,
            num_query_heads=self.heads, num_key_value_heads=1, softmax_scale=self.scale,
            input_layout="TND_NTD", sparse_mode=mode, atten_mask=mask, block_table=self.pages[:bsz], block_size=PAGE,
            actual_seq_qlen=q_lens, actual_seq_kvlen=kv_lens,
        )
        out = torch_npu.npu_transpose_batchmatmul(
            out, self.half_v, bias=None, scale=None, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        return self.o_proj(out.view(bsz, q_len, -1))

    def steps_folded(self, hidden_states, cos_sin=None, slots=None, kv_lens=None, q_lens=None, mask=None, positions=None):
        """Another decode, which these settings do not choose."""
        pages = self.nope_cache.shape[0]
        return self.o_proj(hidden_states.new_zeros(pages, self.pages.shape[1], self.heads * self.out_size))

    def forward(self, hidden_states, is_prefill=True, cos_sin=None, slots=None, kv_lens=None, q_lens=None, mask=None,
                positions=None):
        arguments = {
            "hidden_states": hidden_states,
            "cos_sin": cos_sin,
            "slots": slots,
            "kv_lens": kv_lens,
            "q_lens": q_lens,
            "mask": mask,
            "positions": positions,
        }
        if is_prefill:
            run = self.prompts
        elif self.fold_in:
            run = self.steps_folded
        else:
            run = self.steps
        return run(**arguments)


class TwinMLP(nn.Module):
    def __init__(self, config, infer_config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.chunk_rows = infer_config.model_config.custom_params.get("chunk_rows", 65536)

    def forward(self, x):
        bsz, q_len, width = x.shape
        parts = self.parts(bsz * q_len, x.view(-1, width))
        done = [self.down_proj(F.silu(self.gate_proj(p)) * self.up_proj(p)) for p in parts]
        x = torch.cat(done, dim=0)
        return x.view(bsz, q_len, width)

    def parts(self, count, x):
        if count > self.chunk_rows:
            return list(x.chunk((count + self.chunk_rows - 1) // self.chunk_rows, dim=0))
        return [x]


class TwinLayer(nn.Module):
    def __init__(self, config, infer_config, layer_idx):
        super().__init__()
        self.self_attn = TwinAttention(config, infer_config, layer_idx)
        self.mlp = TwinMLP(config, infer_config)
        self.input_layernorm = TwinNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = TwinNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, kv_lens, cos_sin, q_lens=None, carried=None, mask=None, is_prefill=False, slots=None):
        x, carried = self.input_layernorm(x, carried)
        x = self.self_attn(x, is_prefill=is_prefill, cos_sin=cos_sin, slots=slots, kv_lens=kv_lens, q_lens=q_lens,
                           mask=mask, positions=positions)
        x, carried = self.post_attention_layernorm(x, carried)
        return carried, self.mlp(x)

    def attend_only(self, x, positions, kv_lens, cos_sin, carried=None, mask=None, is_prefill=False, slots=None):
        x, carried = self.input_layernorm(x, carried)
        return self.self_attn(x, is_prefill=is_prefill, cos_sin=cos_sin, slots=slots, kv_lens=kv_lens, q_lens=None,
                              mask=mask, positions=positions), carried


class TwinModel(nn.Module):
    def __init__(self, config, infer_config, **kwargs):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.row_start = kwargs.get("row_start")
        self.slot_count = slots_per_row(infer_config)
        self.overlap = Overlap(infer_config.model_config.custom_params.get("overlap", 0))
        self.build(config, infer_config)

    def build(self, config, infer_config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([TwinLayer(config, infer_config, i) for i in range(config.num_hidden_layers)])
        self.norm = TwinNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = TwinRotary(config)

    def slots_of(self, lengths, is_prefill, device, round_no=0):
        if not is_prefill:
            return None
        start = round_no * self.infer_config.scheduler_config.prefill_mini_batch
        parts = []
        for i, length in enumerate(lengths):
            first = self.slot_count * (i + start)
            parts.append(torch.arange(first, length.item() + first, dtype=lengths.dtype, device=device))
        return torch.cat(parts)

    def ready(self, input_ids, position_ids, kv_lens, is_prefill, round_no=0):
        rows, width = input_ids.shape
        x = self.embed_tokens(input_ids)
        full = torch.tensor([width] * rows, dtype=torch.int64, device=input_ids.device)
        positions = position_ids.view(rows, -1)
        cos_sin = self.rotary(x, full if is_prefill else positions, is_prefill=is_prefill)
        if not is_prefill:
            positions = positions + self.row_start[:rows]
        slots = self.slots_of(full if is_prefill else positions, is_prefill, position_ids.device, round_no)
        return x, None, positions, cos_sin, slots, kv_lens

    def forward(self, input_ids, position_ids, forward_metadata, round_no=0):
        kv_lens = forward_metadata.actual_seq_lengths_kv
        q_lens = forward_metadata.actual_seq_lengths_q
        if forward_metadata.is_prefill and self.overlap != Overlap.OFF:
            return self.forward_overlapped(input_ids, position_ids, forward_metadata)
        x, carried, positions, cos_sin, slots, kv_lens = \
            self.ready(input_ids, position_ids, kv_lens, forward_metadata.is_prefill, round_no)
        for layer in self.layers:
            carried, x = layer(x, positions, kv_lens, cos_sin, q_lens=q_lens, carried=carried,
                               mask=forward_metadata.attention_mask, is_prefill=forward_metadata.is_prefill, slots=slots)
        x, _ = self.norm(x, carried)
        return x

    def forward_overlapped(self, input_ids, position_ids, forward_metadata):
        kv_lens = forward_metadata.actual_seq_lengths_kv
        x, carried, positions, cos_sin, slots, kv_lens = self.ready(input_ids, position_ids, kv_lens, True)
        for layer in self.layers:
            x, carried = layer.attend_only(x, positions, kv_lens, cos_sin, carried=carried,
                                           mask=forward_metadata.attention_mask, is_prefill=True, slots=slots)
        return x


class TwinForCausalLM(nn.Module):
    def __init__(self, config: TwinConfig, infer_config: InferenceConfig, comm_manager=None):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.drafts = False
        rows = infer_config.scheduler_config.batch_size_per_dp_rank
        per_row = slots_per_row(infer_config)
        self.page_count = rows * per_row // PAGE
        self.kwargs = {"row_start": torch.arange(0, rows * per_row, per_row, dtype=torch.int64).view(-1, 1)}
        self.model = TwinModel(config, infer_config, **self.kwargs)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def head(self, x, position_ids, is_prefill=True):
        rows, width, size = x.shape
        if is_prefill:
            rows = position_ids.shape[0]
            last, _ = torch.max(position_ids, dim=-1)
            at = (last + 1).to(torch.int32).cumsum(-1) - 1
            x = torch.index_select(x.view(1, -1, size), 1, at.view(-1)).view(rows, 1, -1)
            width = 1
        else:
            x = x.view(rows * width, 1, size)
        return self.lm_head(x).reshape(rows, width, -1).float()

    def forward(self, input_ids=None, position_ids=None, forward_metadata: ForwardMetaData = None, **kwargs):
        x = self.model(input_ids=input_ids, position_ids=position_ids, forward_metadata=forward_metadata,
                       round_no=kwargs.get("cycle_idx", 0))
        carried = x
        if forward_metadata.is_prefill:
            carried = carried.view(1, -1, self.config.hidden_size)
        return self.head(x, position_ids, forward_metadata.is_prefill), carried

    def init_cache(self, device):
        dtype = next(self.parameters()).dtype
        shapes = ((self.page_count, PAGE, 1, self.config.kv_lora_rank),
                  (self.page_count, PAGE, 1, self.config.qk_rope_head_dim))
        layers = self.model.layers if not self.drafts else self.model.layers.values()
        for layer in layers:
            layer.self_attn.nope_cache = torch.zeros(shapes[0], dtype=dtype, device=device)
            layer.self_attn.rope_cache = torch.zeros(shapes[1], dtype=dtype, device=device)

    def check_model_settings(self):
        mini_batch = self.infer_config.scheduler_config.prefill_mini_batch
        if Overlap(self.infer_config.model_config.custom_params.get("overlap", 0)) != Overlap.OFF:
            if mini_batch == 1:
                raise ValueError(f"two streams need two prompts, not {mini_batch=}")

    def process_weights_after_loading(self):
        def take(layer, name):
            try:
                half = attrgetter(f"self_attn.pending_{name}")(layer)
                setattr(layer.self_attn, f"half_{name}", nn.Parameter(half.contiguous(), requires_grad=False))
            except AttributeError:
                pass

        layers = self.model.layers.values() if self.drafts else self.model.layers
        for layer in layers:
            take(layer, "k")
            take(layer, "v")
            layer.self_attn.up_kv.weight = None

    RENAMED = {"q_a_proj": "down_q", "q_a_layernorm": "norm_q", "q_b_proj": "up_q", "kv_a_proj_with_mqa": "down_kv",
               "kv_a_layernorm": "norm_kv", "kv_b_proj": "up_kv"}

    def load_weights(self, weights):
        params, done = dict(self.named_parameters()), set()
        for name, weight in weights:
            for old, new in self.RENAMED.items():
                name = name.replace(f".{old}.", f".{new}.")
            if name in params:
                default_weight_loader(params[name], weight)
                done.add(name)
        return done


class TwinDraftModel(TwinModel):
    def build(self, config, infer_config):
        self.embed_tokens = None
        first = config.num_hidden_layers
        self.layers = nn.ModuleDict({
            str(first + i): TwinLayer(config, infer_config, first + i) for i in range(config.num_nextn_predict_layers)
        })

    def forward(self, x, positions, kv_lens, cos_sin, q_lens=None, carried=None, mask=None, is_prefill=False, slots=None,
                which=0):
        layer = list(self.layers.values())[which]
        return layer(x, positions, kv_lens, cos_sin, q_lens=q_lens, carried=carried, mask=mask, is_prefill=is_prefill,
                     slots=slots)


class TwinDraft(TwinForCausalLM):
    def __init__(self, config: TwinConfig, infer_config: InferenceConfig, comm_manager=None):
        super().__init__(config, infer_config, comm_manager)
        self.drafts = True
        self.lm_head = None  # the model's
        self.model = TwinDraftModel(config, infer_config, **self.kwargs)
        self.enorm = TwinNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = TwinNorm(config.hidden_size, config.rms_norm_eps)
        self.last_norm = TwinNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.rotary = TwinRotary(config)

    def slots_of(self, lengths, is_prefill, device, round_no=0):
        if not is_prefill:
            return None
        start = round_no * self.infer_config.scheduler_config.prefill_mini_batch
        count = slots_per_row(self.infer_config)
        parts = []
        for i, length in enumerate(lengths):
            parts.append(torch.arange(count * (i + start), length.item() + count * (i + start), device=device))
        return torch.cat(parts)

    def forward(self, input_ids, position_ids=None, forward_metadata=None, prev_hidden_states=None, **kwargs):
        is_prefill = forward_metadata.is_prefill
        kv_lens, q_lens = forward_metadata.actual_seq_lengths_kv, forward_metadata.actual_seq_lengths_q
        rows, width = input_ids.shape
        x = self.model.embed_tokens(input_ids)
        full = torch.tensor([width] * rows, dtype=torch.int64, device=input_ids.device)
        x = self.eh_proj(torch.cat([self.enorm(x), self.hnorm(prev_hidden_states)], dim=-1))
        positions = position_ids.view(rows, -1)
        cos_sin = self.rotary(x, full if is_prefill else positions, is_prefill=is_prefill)
        if not is_prefill:
            positions = positions + self.kwargs["row_start"][:rows]
        slots = self.slots_of(full if is_prefill else positions, is_prefill, position_ids.device,
                              kwargs.get("cycle_idx", 0))
        carried, x = self.model(x, positions, kv_lens, cos_sin, q_lens=q_lens, carried=None,
                                mask=forward_metadata.attention_mask, is_prefill=is_prefill, slots=slots)
        carried, _ = self.last_norm(x, carried)
        out = carried
        if is_prefill:
            carried = carried.view(1, -1, self.config.hidden_size)
        return self.head(out, position_ids=position_ids, is_prefill=is_prefill), carried
