"""Weights of DeepSeek-V2 and V3 models without experts: the options of attention=mla in their configs, and the order of their rows."""

from typing import Any

import torch
from torch import Tensor

from attnzoo.attention.mla import WIDTHS
from attnzoo.hub.configs import require

CLASSES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}


def check(config: Any) -> None:
    """Raises ValueError for a config that our models do not support."""
    require(config, rope_interleave=True, num_key_value_heads=config.num_attention_heads)
    if config.first_k_dense_replace < config.num_hidden_layers:
        raise ValueError(f"{config.model_type} config first_k_dense_replace={config.first_k_dense_replace}: the layers behind that are "
                         f"mixtures of experts, which attnzoo's models do not have; must be the model's {config.num_hidden_layers} layers")


def describe_attention(config: Any) -> dict[str, Any]:
    """See `attnzoo.hub.attention_from_huggingface`."""
    return {"_target_": "attnzoo.attention.mla.MLAttention", "_partial_": True, **{name: getattr(config, name) for name in WIDTHS}}


def matrices(config: Any) -> dict[str, tuple[tuple[str, ...], Tensor | None]]:
    """For each weight of a layer's attention, by its name there: the names of our weights that it holds, one after another, and the indices
    that bring its rows into our order, None if the order is the same.

    Channels that are rotated together are neighbours there and half the rotated width apart here. Their kv_b_proj holds the key and the
    value of one head after another; here all keys come before all values.
    """
    rank, nope, rope, heads = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.num_attention_heads
    pairs = torch.arange(rope).view(-1, 2).T.flatten()
    queries = (torch.arange(heads)[:, None] * (nope + rope) + torch.cat((torch.arange(nope), nope + pairs))).flatten()
    keys, values = torch.arange(heads * (nope + config.v_head_dim)).view(heads, -1).split([nope, config.v_head_dim], 1)
    found = {
        "kv_a_proj_with_mqa": (("kv_a_proj_with_mqa",), torch.cat((torch.arange(rank), rank + pairs))),
        "kv_a_layernorm": (("kv_a_layernorm",), None),
        "kv_b_proj": (("k_proj", "v_proj"), torch.cat((keys.flatten(), values.flatten()))),
    }
    if config.q_lora_rank is None:
        return found | {"q_proj": (("q_proj",), queries)}
    return found | {"q_a_proj": (("q_a_proj",), None), "q_a_layernorm": (("q_a_layernorm",), None), "q_b_proj": (("q_proj",), queries)}
