"""Dual Chunk attention in transformers' decoders: a model that was trained on short contexts reads long ones, without new weights."""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from attnzoo.hub.own_configs import own_configs, put_back
from attnzoo_kernels import dual_chunk_attention
from attnzoo_kernels.dual_chunk.geometry import STAGES, geometry, stage_bits
from attnzoo_kernels.dual_chunk.reference import rotate

NAME = "attnzoo_dual_chunk"
TRIAL = "attnzoo_trial"


def use_dual_chunk(model: nn.Module, *, chunk_size: int | None = None, local_size: int | None = None, variant: str = "paper",
                   stages: Sequence[str] = STAGES, impl: str | None = None) -> nn.Module:
    """Give a transformers decoder with rotary positions Dual Chunk attention (An et al. 2024, arXiv:2402.17463), in place; returns it.

    transformers rotates queries and keys before attention sees them; here its rotary embedding becomes an identity, so that attention and
    the KV cache get them un-rotated, and the rotation is the operator's, in float32, by the frequencies of the model's config. It rotates
    again where another attention is chosen (`use_block_sparse`, `set_attn_implementation`), which needs a new cache; a further
    `use_dual_chunk` takes the place of an earlier one. The model gets a config of its own.

    chunk_size: the context that the model was trained on, None for the config's max_position_embeddings. local_size: what of it is kept for
    distances to the chunk before, None for a quarter. variant, stages, impl: see `attnzoo_kernels.dual_chunk_attention`.

    Prefill, decoding with a cache that holds exactly the tokens read (DynamicCache, transformers' default) and training work; rows of a
    batch have one length. ValueError here for models without one rotary embedding, with frequencies that change with the length, where
    no rotary style fits, or with layers that rotate otherwise or not at all (each is tried on a few tokens); at the forward pass for
    padding, packed rows, other positions, sliding windows, softcap, sinks and dropout.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: must be a transformers model, got {type(model).__name__}")
    name, rotary = _rotary_embedding(model)
    if chunk_size is None:
        chunk_size = model.config.get_text_config().max_position_embeddings
    if local_size is None and isinstance(chunk_size, int):
        local_size = chunk_size // 4
    attention = _DualChunk(rotary, chunk_size, local_size, variant, tuple(stages), impl)
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
        except RuntimeError as error:  # of shapes
            raise ValueError(f"model: {type(model).__name__}'s layers do not take tables as Llama's do: {error}") from error
        attention.check(type(model).__name__, plain, turned)
    except BaseException:
        model.set_submodule(name, before)
        put_back(configs)
        raise
    finally:
        for module, training in modes:
            module.training = training
    unrotated.implementation = NAME
    for module in modules:
        module.attnzoo_dual_chunk = attention
    _install(model, NAME, _attend, _no_mask)
    return model


def _install(model: nn.Module, implementation: str, attention: Callable, mask: Callable) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(implementation, attention)
    AttentionMaskInterface.register(implementation, mask)
    model.set_attn_implementation(implementation)


def _attend(module: nn.Module, *operands: Tensor | None, **options) -> tuple[Tensor, None]:
    """transformers' attention function, for modules of models that `use_dual_chunk` converted: the others' queries are rotated."""
    if not hasattr(module, "attnzoo_dual_chunk"):
        raise ValueError(f"attn_implementation: {NAME!r} is for models that hub.use_dual_chunk converted, got {type(module).__name__} of "
                         "one that it did not; call hub.use_dual_chunk(model), or model.set_attn_implementation(\"sdpa\")")
    return module.attnzoo_dual_chunk(module, *operands, **options)


@torch.no_grad()
def _queries_and_keys(model: nn.Module, tokens: int = 5) -> tuple[list[tuple[Tensor, Tensor]], list[nn.Module]]:
    """What each layer hands to attention, (batch, heads, tokens, width), and the modules that do.

    Attention gives zeros: no layer depends on those before it.
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
    """Turns nothing where `implementation` is the attention, by multiplication by one, exact in every dtype; else as the model's own."""

    def __init__(self, own: nn.Module, attentions: list[nn.Module], implementation: str):
        super().__init__()
        self.own, self.attentions, self.implementation = own, attentions, implementation

    def forward(self, x: Tensor, position_ids: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        found = {module.config._attn_implementation for module in self.attentions}
        if self.implementation not in found:
            return self.own(x, position_ids, *args, **kwargs)
        if len(found) > 1:
            raise ValueError(f"attn_implementation: must be one for all layers of a model after hub.use_dual_chunk, got "
                             f"{', '.join(sorted(map(str, found)))}; choose one by model.set_attn_implementation")
        shape = (*position_ids.shape, 2 * len(self.own.inv_freq))
        return x.new_ones(shape), x.new_zeros(shape)


def _own(rotary: nn.Module) -> nn.Module:
    """The model's own rotary embedding, which an earlier use_dual_chunk may have replaced."""
    return rotary.own if isinstance(rotary, _Unrotated) else rotary


class _DualChunk:
    """Attention with the options and tables of one model."""

    def __init__(self, rotary: nn.Module, chunk_size: int, local_size: int, variant: str, stages: tuple[str, ...], impl: str | None):
        self.positions = geometry(chunk_size, local_size, variant).positions
        stage_bits(stages)
        self.options = {"chunk_size": chunk_size, "local_size": local_size, "variant": variant, "stages": stages, "impl": impl}
        self.frequencies = rotary.inv_freq.double().cpu()
        self.query_scale = rotary.attention_scaling**2  # transformers scales both tables, so both q and k
        self.interleaved = _is_interleaved(rotary)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 (positions, rotary_dim / 2)."""
        if device not in self._tables:
            angles = torch.arange(self.positions, dtype=torch.float64)[:, None] * self.frequencies
            self._tables[device] = angles.cos().float().to(device), angles.sin().float().to(device)
        return self._tables[device]

    def check(self, model: str, plain: list[tuple[Tensor, Tensor]], turned: list[tuple[Tensor, Tensor]]) -> None:
        """Refuse models whose attention does not get `plain` queries and keys turned by this rotation and nothing else."""
        if not plain:
            raise ValueError(f"model: must call transformers' attention interface, as Llama, Mistral and Qwen do; {model} does not")
        for layer, pairs in enumerate(zip(plain, turned, strict=True)):
            for x, expected in zip(*pairs, strict=True):
                found = x
                if x.shape[-1] >= 2 * len(self.frequencies):
                    angles = torch.arange(x.shape[2], device=x.device)[None, :, None] * self.frequencies.to(x.device)
                    found = rotate(x.transpose(1, 2), angles.cos(), angles.sin(), self.interleaved).transpose(1, 2) * self.query_scale**0.5
                # as a share of what the rotation changes, above which no rounding gets
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
                raise ValueError(f"{name}: dual chunk attention has none, got {shown}; use a model and inputs without it")
        if position_ids is not None and getattr(module, "layer_idx", 0) == 0 and not torch.compiler.is_compiling():
            _check_positions(position_ids, query.shape[2], key.shape[2])
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        cos, sin = self.tables(query.device)
        out = dual_chunk_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), cos=cos, sin=sin, softmax_scale=scaling * self.query_scale,
            causal=getattr(module, "is_causal", True), rope_interleaved=self.interleaved, **self.options)
        return out, None


def _rotary_embedding(model: nn.Module) -> tuple[str, nn.Module]:
    """Name of the model's rotary embedding and one like it, new and in float32, whatever the model was cast to."""
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
    """Which channels the model's own code pairs, by trial."""
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


def _no_mask(*, kv_length: int, attention_mask: Tensor | None = None, mask_function=None, **_) -> None:
    """transformers' mask function: nothing to make, once it is known that the mask is the causal one."""
    from transformers.masking_utils import causal_mask_function

    if mask_function is not causal_mask_function:
        raise ValueError("attention mask: dual chunk attention has the causal one only in transformers' models; give no packed rows "
                         "(position_ids that start again), and set config.sliding_window=None")
    if attention_mask is not None and (attention_mask.shape[-1] != kv_length or not attention_mask.all()):
        padded = kv_length * attention_mask.shape[0] - int(attention_mask.sum())
        raise ValueError(f"attention_mask: dual chunk attention takes no padding in transformers' models, got {padded} padded keys; "
                         "give rows of one length, and no StaticCache")


def _check_positions(position_ids: Tensor, tokens: int, keys: int) -> None:
    expected = torch.arange(keys - tokens, keys, device=position_ids.device)
    if not torch.equal(position_ids, expected.expand_as(position_ids)):
        raise ValueError(f"position_ids: must count from the cache's {keys - tokens} tokens on, {keys - tokens} to {keys - 1}, got "
                         f"{int(position_ids.min())} to {int(position_ids.max())}; leave them out")
