"""Config and parameter names of the Forgetting Transformer's published weights, FoX and FoX (Pro) (Lin et al. 2025, arXiv:2503.02130).

transformers does not have this architecture, and no code of its authors runs here.
"""

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from attnzoo.hub.configs import require

TRAINED_CONTEXT = 16384  # the same for all published models; their configs do not have it
QK_NORM_EPS = 1e-5  # independent of norm_eps

Parameter = tuple[tuple[str, ...], tuple[int, ...]]


class FoXConfig(PreTrainedConfig):
    """The options that decide how the published models compute, with the defaults of their authors' code."""

    model_type = "forgetting_transformer-project_fox"
    vocab_size: int = 32000
    hidden_size: int = 2048
    hidden_ratio: float | None = 4
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    num_heads: int = 32
    num_kv_heads: int | None = None
    hidden_act: str = "swish"
    window_size: int | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_rope: bool = False
    rope_base: float = 500000.0
    use_output_gate: bool = False
    ogate_act: str = "sigmoid"
    fgate_type: str = "full"
    use_output_norm: bool = False
    qk_norm: bool = False
    qk_norm_share_param_across_head: bool = False
    use_k_shift: bool = False
    use_v_shift: bool = False


class FoXForCausalLM(PreTrainedModel):
    """The published parameters, so that `from_pretrained` can read them. It has no forward pass: `from_huggingface` makes a GPT of it."""

    config_class = FoXConfig

    def __init__(self, config: FoXConfig):
        super().__init__(config)
        for name, (_, shape) in parameters(config).items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape)))
        self.post_init()


def register() -> None:
    """Registers the config with transformers, unless the authors' own package has done so."""
    if FoXConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(FoXConfig.model_type, FoXConfig)


def describe(config: Any) -> dict[str, Any]:
    """See `attnzoo.hub.config_from_huggingface`."""
    require(config, num_kv_heads=None, window_size=None, hidden_act="swish", fgate_type="full", ogate_act="sigmoid",
            tie_word_embeddings=False, **({"qk_norm_share_param_across_head": True} if config.qk_norm else {}))
    return {
        "_target_": "attnzoo.models.GPT", "vocab_size": config.vocab_size, "dim": config.hidden_size, "n_layers": config.num_hidden_layers,
        "n_heads": config.num_heads, "mlp": "swiglu", "mlp_dim": _mlp_dim(config), "norm": "rmsnorm", "norm_eps": config.norm_eps,
        "norm_position": "pre", "positions": "rotary" if config.use_rope else "none", "rope_base": config.rope_base,
        "qk_norm": config.qk_norm, "attention_gate": "elementwise" if config.use_output_gate else "none", "bias": False,
        "train_context": TRAINED_CONTEXT, "tie_embeddings": False, "pad_vocab_multiple": 64,
    }


def describe_attention(config: Any) -> dict[str, Any]:
    """See `attnzoo.hub.attention_from_huggingface`."""
    return {
        "_target_": "attnzoo.attention.forgetting.ForgettingAttention", "_partial_": True, "shift_keys": config.use_k_shift,
        "shift_values": config.use_v_shift, "output_norm": config.use_output_norm, "qk_norm_eps": QK_NORM_EPS if config.qk_norm else None,
    }


def parameters(config: Any) -> dict[str, Parameter]:
    """For each published parameter, by its name: the names of our parameters that it holds, one after another, and its shape."""
    width, heads, hidden = config.hidden_size, config.num_heads, _mlp_dim(config)
    square, by_head = (width, width), (heads, width)
    layer: dict[str, Parameter] = {
        "attn_norm.weight": (("attention_norm.weight",), (width,)),
        "attn.q_proj.weight": (("attention.q_proj.weight",), square),
        "attn.o_proj.weight": (("attention.o_proj.weight",), square),
        "attn.fgate_proj.weight": (("attention.fgate_proj.weight",), by_head),
        "attn.fgate_proj.bias": (("attention.fgate_proj.bias",), (heads,)),
        "mlp_norm.weight": (("mlp_norm.weight",), (width,)),
        "mlp.gate_proj.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), (2 * hidden, width)),
        "mlp.down_proj.weight": (("mlp.down_proj.weight",), (width, hidden)),
    }
    for x, shifts in (("k", config.use_k_shift), ("v", config.use_v_shift)):
        layer[f"attn.{x}_proj.linear.weight" if shifts else f"attn.{x}_proj.weight"] = ((f"attention.{x}_proj.weight",), square)
        if shifts:
            layer[f"attn.{x}_proj.shift_proj.weight"] = ((f"attention.{x}_shift.weight",), by_head)
    if config.qk_norm:
        layer |= {f"attn.{x}_norm.weight": ((f"attention.{x}_norm.weight",), (width // heads,)) for x in "qk"}
    if config.use_output_gate:
        layer["attn.ogate_proj.weight"] = (("attention.g_proj.weight",), square)
    if config.use_output_norm:
        layer["attn.output_norm.weight"] = (("attention.output_norm.weight",), (width,))
    return {
        "model.embeddings.weight": (("token_embedding.weight",), (config.vocab_size, width)),
        **{f"model.layers.{i}.{theirs}": (tuple(f"blocks.{i}.{name}" for name in ours), shape)
           for i in range(config.num_hidden_layers) for theirs, (ours, shape) in layer.items()},
        "model.norm.weight": (("final_norm.weight",), (width,)),
        "lm_head.weight": (("head.weight",), (config.vocab_size, width)),
    }


def _mlp_dim(config: Any) -> int:
    """intermediate_size, or without it 2/3 of hidden_ratio (4 by default) times hidden_size, rounded up to a multiple of 256."""
    return config.intermediate_size or -(-int(config.hidden_size * (config.hidden_ratio or 4) * 2 / 3) // 256) * 256
