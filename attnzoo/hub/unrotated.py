"""The common part of `use_dual_chunk` and `use_two_frame`: attention that rotates queries and keys itself, in transformers' decoders.

transformers rotates queries and keys before they reach attention. Here the model's rotary embedding becomes an identity, so that attention
and the KV cache get queries and keys without rotation. The rotary embedding rotates again if another attention is chosen.
"""

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnzoo.hub.own_configs import own_configs, put_back
from attnzoo_kernels.dual_chunk.reference import rotate

TRIAL = "attnzoo_trial"


class OwnRotation:
    """Attention over queries and keys without rotation, with the options and the frequencies of one model.

    A subclass has `attend`, its name in messages (`title`), its name as an attn_implementation (`implementation`), and the name of the
    function that gives it to a model (`converter`).
    """

    title: str
    implementation: str
    converter: str

    def __init__(self, rotary: nn.Module):
        self.frequencies = rotary.inv_freq.double().cpu()
        self.magnitude = rotary.attention_scaling  # a factor of both tables, and so of q and of k
        self.interleaved = _is_interleaved(rotary)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        """q, k, v and the result (batch, tokens, heads, width); the queries are the last tokens."""
        raise NotImplementedError

    def check(self, model: str, plain: list[tuple[Tensor, Tensor]], turned: list[tuple[Tensor, Tensor]]) -> None:
        """Raises ValueError unless each layer's `turned` queries and keys are the `plain` ones after this rotation and nothing else."""
        if not plain:
            raise ValueError(f"model: must call transformers' attention interface, as Llama, Mistral and Qwen do; {model} does not")
        for layer, pairs in enumerate(zip(plain, turned, strict=True)):
            for x, expected in zip(*pairs, strict=True):
                found = x
                if x.shape[-1] >= 2 * len(self.frequencies):
                    angles = torch.arange(x.shape[2], device=x.device)[None, :, None] * self.frequencies.to(x.device)
                    found = rotate(x.transpose(1, 2), angles.cos(), angles.sin(), self.interleaved).transpose(1, 2) * self.magnitude
                # a share of the largest change by the rotation; rounding errors stay below it
                allowed = 16 * max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) * (expected - x).abs().max()
                if not (found - expected).abs().max() < allowed:
                    raise ValueError(f"model: each layer must rotate queries and keys, and hand them to attention as they are then; layer "
                                     f"{layer} of {model} does otherwise")

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
                 scaling: float | None = None, dropout: float = 0.0, position_ids: Tensor | None = None, **options) -> tuple[Tensor, None]:
        """query, key, value (batch, heads, tokens, width); returns (batch, tokens, heads, width)."""
        unsupported = {name: options.get(name) for name in ("sliding_window", "softcap", "s_aux", "cu_seq_lens_q")}
        for name, given in (unsupported | {"dropout": dropout or None, "attention_mask": attention_mask}).items():
            if given is not None:
                shown = tuple(given.shape) if isinstance(given, Tensor) else given
                raise ValueError(f"{name}: {self.title} has none, got {shown}; use a model and inputs without it")
        if position_ids is not None and getattr(module, "layer_idx", 0) == 0 and not torch.compiler.is_compiling():
            _check_positions(position_ids, query.shape[2], key.shape[2])
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.attend(*(x.transpose(1, 2) for x in (query, key, value)), scaling, getattr(module, "is_causal", True)), None


def convert(model: nn.Module, make: Callable[[nn.Module, int], OwnRotation]) -> nn.Module:
    """Gives a decoder the attention that `make` returns for its rotary embedding and its config's max_position_embeddings, in place;
    returns the model. If this raises, the model is as it was before."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: must be a transformers model, got {type(model).__name__}")
    name, rotary = _rotary_embedding(model)
    attention = make(rotary, model.config.get_text_config().max_position_embeddings)
    before, own = model.get_submodule(name), _own(model.get_submodule(name))
    modes = [(module, module.training) for module in model.modules()]
    configs = own_configs(model)
    try:
        model.eval()
        model.set_submodule(name, own)
        turned, modules = _queries_and_keys(model)
        unrotated = _Unrotated(own, modules, TRIAL)
        model.set_submodule(name, unrotated)
        try:
            plain, _ = _queries_and_keys(model)
        except RuntimeError as error:  # shapes do not match
            raise ValueError(f"model: {type(model).__name__}'s layers do not take tables as Llama's do: {error}") from error
        attention.check(type(model).__name__, plain, turned)
    except BaseException:
        model.set_submodule(name, before)
        put_back(configs)
        raise
    finally:
        for module, training in modes:
            module.training = training
    unrotated.implementation = attention.implementation
    for module in modules:
        module.attnzoo_own_rotation = attention
    _install(model, attention.implementation, functools.partial(_attend, type(attention)), functools.partial(_no_mask, attention.title))
    return model


def _install(model: nn.Module, implementation: str, attention: Callable, mask: Callable) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(implementation, attention)
    AttentionMaskInterface.register(implementation, mask)
    model.set_attn_implementation(implementation)


def _attend(kind: type[OwnRotation], module: nn.Module, *operands: Tensor | None, **options) -> tuple[Tensor, None]:
    """The attention function for transformers. Raises ValueError for modules of other models, whose queries are rotated already."""
    attention = getattr(module, "attnzoo_own_rotation", None)
    if not isinstance(attention, kind):
        raise ValueError(f"attn_implementation: {kind.implementation!r} is for models that {kind.converter} converted, got "
                         f"{type(module).__name__} of one that it did not; call {kind.converter}(model), or "
                         "model.set_attn_implementation(\"sdpa\")")
    return attention(module, *operands, **options)


@torch.no_grad()
def _queries_and_keys(model: nn.Module, tokens: int = 5) -> tuple[list[tuple[Tensor, Tensor]], list[nn.Module]]:
    """The queries and keys that each layer hands to attention, (batch, heads, tokens, width), and the modules that do so.

    Attention returns zeros here, so that no layer's attention influences the layers after it.
    """
    seen, modules = [], []

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_, **__) -> tuple[Tensor, None]:
        seen.append((query, key))
        modules.append(module)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    _install(model, TRIAL, attention, lambda **_: None)
    model(torch.arange(tokens, device=model.device)[None], use_cache=False)
    return seen, modules


class _Unrotated(nn.Module):
    """An identity (cos 1, sin 0, exact in every dtype) while the attention is `implementation`; otherwise the model's own embedding."""

    def __init__(self, own: nn.Module, attentions: list[nn.Module], implementation: str):
        super().__init__()
        self.own, self.attentions, self.implementation = own, attentions, implementation

    def forward(self, x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        found = {module.config._attn_implementation for module in self.attentions}
        if self.implementation not in found:
            return self.own(x, position_ids, *args, **kwargs)
        if len(found) > 1:
            raise ValueError(f"attn_implementation: must be one for all layers of a model that has {self.implementation!r}, got "
                             f"{', '.join(sorted(map(str, found)))}; choose one by model.set_attn_implementation")
        shape = (*position_ids.shape, 2 * len(self.own.inv_freq))
        return x.new_ones(shape), x.new_zeros(shape)


def _own(rotary: nn.Module) -> nn.Module:
    """The model's own rotary embedding, which an earlier conversion may have replaced."""
    return rotary.own if isinstance(rotary, _Unrotated) else rotary


def _rotary_embedding(model: nn.Module) -> tuple[str, nn.Module]:
    """The name of the model's rotary embedding, and a new one like it that is in float32 even if the model was cast."""
    replaced = {module.own for module in model.modules() if isinstance(module, _Unrotated)}
    found = {name: _own(module) for name, module in model.named_modules() if hasattr(_own(module), "inv_freq") and module not in replaced}
    if len(found) != 1 or not hasattr(next(iter(found.values())), "attention_scaling"):
        given = ", ".join(found) or "none"
        raise ValueError(f"model: must have one rotary embedding for all layers, as Llama, Mistral and Qwen have; "
                         f"{type(model).__name__} has {given}")
    (name, module), = found.items()
    rope_type = getattr(module, "rope_type", "default")
    if "dynamic" in rope_type or rope_type == "longrope":
        raise ValueError(f"model: rope_type={rope_type!r} changes its frequencies with the length; set another in config.rope_parameters")
    return name, type(module)(module.config)


def _is_interleaved(rotary: nn.Module) -> bool:
    """Whether the model's own code pairs neighbouring channels (True) or those half the width apart (False), by trial."""
    apply = getattr(sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None)
    width, rows = 2 * len(rotary.inv_freq), 5
    x = torch.randn(1, 1, rows, width, generator=torch.Generator().manual_seed(0))
    turned = apply(x, x, *rotary(x, torch.arange(rows)[None]))[0] / rotary.attention_scaling if apply else None
    angles = torch.arange(rows)[None, :, None] * rotary.inv_freq
    for interleaved in (False, True):
        ours = rotate(x.transpose(1, 2), angles.cos(), angles.sin(), interleaved).transpose(1, 2)
        if turned is not None and torch.allclose(turned, ours, atol=1e-4):
            return interleaved
    raise ValueError(f"model: {type(rotary).__name__} pairs channels neither in half nor in interleaved style")


def _no_mask(title: str, *, kv_length: int, attention_mask: Tensor | None = None, mask_function=None, **_) -> None:
    """The mask function for transformers. It makes no mask, and raises ValueError unless the mask is the causal one without padding."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is not causal_mask_function:
        raise ValueError(f"attention mask: {title} has the causal one only in transformers' models; give no packed rows "
                         "(position_ids that start again), and set config.sliding_window=None")
    if attention_mask is not None and (attention_mask.shape[-1] != kv_length or not attention_mask.all()):
        padded = kv_length * attention_mask.shape[0] - int(attention_mask.sum())
        raise ValueError(f"attention_mask: {title} takes no padding in transformers' models, got {padded} padded keys; "
                         "give rows of one length, and no StaticCache")


def _check_positions(position_ids: Tensor, tokens: int, keys: int) -> None:
    expected = torch.arange(keys - tokens, keys, device=position_ids.device)
    if not torch.equal(position_ids, expected.expand_as(position_ids)):
        raise ValueError(f"position_ids: must count from the cache's {keys - tokens} tokens on, {keys - tokens} to {keys - 1}, got "
                         f"{int(position_ids.min())} to {int(position_ids.max())}; leave them out")
