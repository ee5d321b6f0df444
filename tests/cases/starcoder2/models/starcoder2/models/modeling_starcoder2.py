# coding=utf-8
"""PyTorch StarCoder2 model for NPU inference (Legacy KV cache + SDPA)."""

from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import torch
from torch import nn

from executor.core.config import CommManager, InferenceConfig
from executor.model_loader.weight_utils import default_weight_loader
from executor.utils.forward_metadata import ForwardMetaData

from .configuration_starcoder2 import StarCoderConfig


class ContiguousCache:
    """Keeps the interface of transformers' Cache, so that the vendored attention stays as it was.

    One [batch, kv_heads, max_len, head_dim] pair per layer.
    """

    def __init__(self, num_layers: int, batch_size: int, num_heads: int, max_len: int, head_dim: int, dtype, device):
        shape = (batch_size, num_heads, max_len, head_dim)
        self.key_cache: List[torch.Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.value_cache: List[torch.Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._seen_tokens = 0

    def get_seq_length(self) -> int:
        return self._seen_tokens

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: Optional[Dict[str, Any]] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.key_cache[layer_idx], self.value_cache[layer_idx]
        if cache_kwargs["is_prefill"]:
            q_len = key_states.shape[-2]
            keys[:, :, :q_len] = key_states
            values[:, :, :q_len] = value_states
            if layer_idx == 0:
                self._seen_tokens = q_len
            return key_states, value_states

        cache_position = cache_kwargs["cache_position"]
        rows = torch.arange(key_states.shape[0], device=key_states.device)
        keys[rows, :, cache_position] = key_states[:, :, 0]
        values[rows, :, cache_position] = value_states[:, :, 0]
        if layer_idx == 0:
            self._seen_tokens = int(cache_position.max()) + 1
        return keys[:, :, : self._seen_tokens], values[:, :, : self._seen_tokens]


class Starcoder2MLP(nn.Module):
    def __init__(self, config: StarCoderConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_bias)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_bias)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, hidden_states):
        return self.c_proj(self.act(self.c_fc(hidden_states)))


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    """(batch, num_key_value_heads, seqlen, head_dim) -> (batch, num_attention_heads, seqlen, head_dim)"""
    if n_rep == 1:
        return hidden_states
    return torch.repeat_interleave(hidden_states, n_rep, dim=1)


def sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: float,
    sliding_window: Optional[int] = None,
    **kwargs,
) -> Tuple[torch.Tensor, None]:
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    if sliding_window is not None and key.shape[-2] > sliding_window:
        # keys older than the window are out of sight
        q_pos = torch.arange(key.shape[-2] - query.shape[-2], key.shape[-2], device=key.device)
        in_window = torch.arange(key.shape[-2], device=key.device) > q_pos[:, None] - sliding_window
        attention_mask = in_window if attention_mask is None else attention_mask & in_window
    attn_output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=0.0, is_causal=False, scale=scaling
    )
    return attn_output.transpose(1, 2).contiguous(), None


class Starcoder2Attention(nn.Module):
    """Multi-headed attention from 'Attention Is All You Need' paper"""

    def __init__(self, config: StarCoderConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        tp_size = infer_config.parallel_config.attn_tp_size
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_heads = config.num_attention_heads // tp_size
        self.num_key_value_heads = max(config.num_key_value_heads // tp_size, 1)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=config.use_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.use_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=config.use_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Tuple[torch.Tensor, torch.Tensor],
        attention_mask: Optional[torch.Tensor],
        past_key_values: ContiguousCache,
        cache_position: Optional[torch.Tensor] = None,
        is_prefill: bool = True,
        **kwargs,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        cache_kwargs = {"sin": sin, "cos": cos, "cache_position": cache_position, "is_prefill": is_prefill}
        key_states, value_states = past_key_values.update(key_states, value_states, self.layer_idx, cache_kwargs)

        attn_output, attn_weights = sdpa_attention_forward(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            scaling=self.scaling,
            sliding_window=getattr(self.config, "sliding_window", None),  # diff with Llama
            **kwargs,
        )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


class Starcoder2DecoderLayer(nn.Module):
    def __init__(self, config: StarCoderConfig, infer_config: InferenceConfig, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = Starcoder2Attention(config, infer_config, layer_idx)
        self.mlp = Starcoder2MLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        past_key_values: Optional[ContiguousCache] = None,
        position_embeddings: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        **kwargs,
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        # Self Attention
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states

        # Fully Connected
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class Starcoder2RotaryEmbedding(nn.Module):
    inv_freq: torch.Tensor  # fix linting for `register_buffer`

    def __init__(self, config: StarCoderConfig):
        super().__init__()
        dim = config.hidden_size // config.num_attention_heads
        inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


class Starcoder2Model(nn.Module):
    def __init__(self, config: StarCoderConfig, infer_config: InferenceConfig, prefix: str = ""):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Starcoder2DecoderLayer(config, infer_config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.rotary_emb = Starcoder2RotaryEmbedding(config=config)

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: torch.LongTensor,
        past_key_values: ContiguousCache,
        forward_metadata: ForwardMetaData,
    ) -> torch.Tensor:
        q_len = input_ids.shape[1]
        causal_mask = None
        if forward_metadata.is_prefill:
            # the engine's mask marks what is hidden, SDPA wants what is visible
            causal_mask = ~forward_metadata.attention_mask[:q_len, :q_len]

        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=causal_mask,
                past_key_values=past_key_values,
                position_embeddings=position_embeddings,
                cache_position=forward_metadata.kv_len,
                is_prefill=forward_metadata.is_prefill,
            )
        return self.norm(hidden_states)


class Starcoder2ForCausalLM(nn.Module):
    def __init__(
        self,
        config: StarCoderConfig,
        infer_config: InferenceConfig,
        comm_manager: CommManager = None,
        prefix: str = "",
    ):
        super().__init__()
        self.config = config
        self.infer_config = infer_config
        self.batch_size = infer_config.scheduler_config.batch_size_per_dp_rank
        self.model = Starcoder2Model(config, infer_config, prefix="model")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.past_key_values = None

    def init_cache(self, device):
        max_len = self.infer_config.data_config.input_truncated_len + self.infer_config.scheduler_config.max_new_tokens
        attn = self.model.layers[0].self_attn
        self.past_key_values = ContiguousCache(
            num_layers=self.config.num_hidden_layers,
            batch_size=self.batch_size,
            num_heads=attn.num_key_value_heads,
            max_len=max_len,
            head_dim=attn.head_dim,
            dtype=self.lm_head.weight.dtype,
            device=device,
        )

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: Optional[torch.LongTensor] = None,
        forward_metadata: ForwardMetaData = None,
        **kwargs,
    ) -> torch.Tensor:
        # BSND shim for the packed input, equal lengths only
        input_ids = input_ids.view(self.batch_size, -1)
        position_ids = position_ids.view(self.batch_size, -1)
        hidden_states = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=self.past_key_values,
            forward_metadata=forward_metadata,
        )
        # Only compute necessary logits
        hidden_states = hidden_states[:, -1:, :]
        logits = self.lm_head(hidden_states)
        return logits.float()

    def load_weights(self, weights: Iterable[Tuple[str, torch.Tensor]]) -> Set[str]:
        params_dict = dict(self.named_parameters())
        loaded_params: Set[str] = set()
        for name, loaded_weight in weights:
            if "lm_head" in name and self.config.tie_word_embeddings:
                continue
            param = params_dict[name]
            weight_loader = getattr(param, "weight_loader", default_weight_loader)
            weight_loader(param, loaded_weight)
            loaded_params.add(name)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            loaded_params.add("lm_head.weight")
        return loaded_params
