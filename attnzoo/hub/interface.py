"""attnzoo's operators in transformers' models, as `attn_implementation="attnzoo_flash"` and `"attnzoo_block_sparse"`.

Both support what transformers hands to its own flash attention: padding, packed sequences (cu_seq_lens, or position_ids that start again)
and sliding windows; attnzoo_flash also supports soft caps, learned sinks and dropout. Other masks and options raise ValueError.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnzoo.attention.cache import DECODED_TOKENS
from attnzoo.hub import engine
from attnzoo.hub.own_configs import own_configs
from attnzoo_kernels import block_sparse_attention, decode_attention, flash_attention, padding
from attnzoo_kernels.block_sparse.patterns import PATTERNS, Pattern

DEFAULT_PATTERN = {"name": "longformer"}
MASKS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay", "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
}


def register() -> None:
    """Registers both names with transformers. `import attnzoo.hub` does it."""
    from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils

    for name, function in FUNCTIONS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, attention_mask)
    # without this, a model looks for a package or a kernel on the hub when it is loaded with a name that contains "flash"
    asked = modeling_utils.is_flash_attention_requested

    @functools.wraps(asked)
    def is_flash_attention_requested(config: Any = None, requested_attention_implementation: str | None = None, *version: Any, **more: Any):
        name = requested_attention_implementation or getattr(config, "_attn_implementation", None)
        return name not in FUNCTIONS and asked(config, requested_attention_implementation, *version, **more)

    if not hasattr(asked, "__wrapped__"):
        modeling_utils.is_flash_attention_requested = is_flash_attention_requested
    engine.register()


def use_block_sparse(model: torch.nn.Module, pattern: str = "longformer", **options: Any) -> torch.nn.Module:
    """Gives a transformers model attnzoo_block_sparse with a pattern of `attnzoo_kernels.block_sparse.patterns`, in place; returns it.

    The model gets its own copy of its config, and the pattern is written there as `attnzoo_block_sparse`. save_pretrained keeps it. For a
    config without this entry the pattern is longformer.
    """
    Pattern(pattern, **options)
    own_configs(model)
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.attnzoo_block_sparse = {"name": pattern, **options}
    model.set_attn_implementation("attnzoo_block_sparse")
    return model


def flash(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
          scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
          s_aux: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """`flash_attention` with transformers' attention interface: query (batch, heads, seqlen, head_dim) to (batch, seqlen, heads, ...)."""
    _refuse("attnzoo_flash", kwargs)
    options = _options(module, scaling, sliding_window, is_causal) | {"softcap": softcap or 0.0}
    options |= {"sinks": None if s_aux is None else s_aux.float()}
    cache = kwargs.pop("cache", None)
    if cache is not None and kwargs.get("block_table") is not None:
        return engine.decode(module, cache, *_operands(query, key, value), kwargs, options), None
    if cache is not None:  # packed: earlier keys and values, if any, are gathered from their pages, and `update` puts lengths in kwargs
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    q, k, v = _operands(query, key, value)

    def attend(q: Tensor, k: Tensor, v: Tensor, **packing: Any) -> Tensor:
        differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, options["sinks"]))
        if packing or dropout > 0 or differentiable or not q.is_cuda or q.shape[1] > DECODED_TOKENS:
            return flash_attention(q, k, v, dropout_p=dropout, **options, **packing)
        lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        return decode_attention(q, k, v, cache_seqlens=lengths, **options)

    anywhere = _may_cross(module) and not options["causal"] and options["window_size"] == (-1, -1)
    return _attend(attend, q, k, v, attention_mask, kwargs, anywhere), None


def block_sparse(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
                 scaling: float | None = None, sliding_window: int | None = None, is_causal: bool | None = None,
                 **kwargs: Any) -> tuple[Tensor, None]:
    """As `flash`, with `block_sparse_attention` and the pattern that the model's config names (see `use_block_sparse`)."""
    _refuse("attnzoo_block_sparse", kwargs | {"dropout": dropout or None}, "softcap", "s_aux", "dropout", "cache")
    q, k, v = _operands(query, key, value)
    options = _options(module, scaling, sliding_window, is_causal)
    if getattr(module, "is_decoder", False) and not options["causal"]:
        raise ValueError("attention to an encoder's tokens: attn_implementation=\"attnzoo_block_sparse\" does not support it, because "
                         "patterns are of one sequence; load the model with attn_implementation=\"attnzoo_flash\"")
    chosen = {"causal": options["causal"]} | (getattr(module.config, "attnzoo_block_sparse", None) or DEFAULT_PATTERN)
    if "heads" in inspect.signature(PATTERNS[chosen["name"]]).parameters:
        chosen.setdefault("heads", q.shape[-2])
    pattern = Pattern(**chosen)

    def attend(q: Tensor, k: Tensor, v: Tensor, **packing: Any) -> Tensor:
        if packing and not pattern.prefix_stable:
            raise ValueError(f"{pattern}: last_global depends on a sequence's end, which padded and packed sequences do not share; "
                             "set last_global=false")
        return block_sparse_attention(q, k, v, pattern, **options, **packing)

    return _attend(attend, q, k, v, attention_mask, kwargs), None


def attention_mask(batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
                   mask_function: Callable | None = None, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The part of a model's mask that the attention functions need; the model itself tells them causality and windows. Returns one of

    None: every key is real.
    bool (batch, keys): which keys are real. The queries are at the last of them.
    uint8 (batch, keys): likewise, where the host does not know which keys the queries are at, as with a static cache. All queries then
        count as real. Keys beyond the mask's width are not real.
    int32 (sequences + 1,): cu_seqlens of the sequences that are packed into the flattened rows.
    int64 (batch, tokens): the number of each token's sequence, while a CUDA graph is captured, because the host then cannot count the
        sequences. The attention functions then need cu_seq_lens_q, which transformers' engine gives them.
    """
    parts = _parts(mask_function) if mask_function is not None else {}
    for kind in parts.keys() - MASKS:
        raise ValueError(f"attn_implementation: attnzoo's know causal, bidirectional, sliding-window, padding and packed masks, this model "
                         f"asks for {kind}; load it with attn_implementation=\"sdpa\"")
    if "packed_sequence_mask_function" in parts:
        sequence = parts["packed_sequence_mask_function"]["packed_sequence_mask"]
        return sequence if _capturing() else _boundaries(sequence)
    if attention_mask is None:
        known = not isinstance(q_offset, Tensor)
        if "causal_mask_function" not in parts or known and q_offset + q_length == kv_offset + kv_length:
            return None
        # a static cache: the places that it has not filled yet are not keys
        keys = torch.arange(kv_length, device=kwargs.get("device", None if known else q_offset.device)) + kv_offset
        return (keys < q_offset + q_length).expand(batch_size, -1).byte()
    attention_mask = attention_mask[:, -kv_length:]
    if attention_mask.shape[1] == kv_length and not _capturing() and attention_mask.all():
        return None
    at_end = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + attention_mask.shape[1]
    return attention_mask if at_end else attention_mask.byte()


def _capturing() -> bool:
    """Whether a CUDA graph is being captured. The host must not wait for the device then."""
    return not torch.compiler.is_compiling() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _boundaries(sequence: Tensor) -> Tensor:
    """cu_seqlens of the flattened rows from the number (batch, seqlen) of the sequence that each token belongs to."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    end = torch.full((1,), sequence.numel(), device=sequence.device)
    return torch.cat([starts.flatten().nonzero().flatten(), end]).to(torch.int32)


@torch.compiler.disable
def _parts(mask_function: Callable) -> dict[str, dict[str, Any]]:
    """The functions of which transformers composed a mask: by name, the variables that each function holds."""
    kind = mask_function.__qualname__.partition(".")[0]
    variables = dict(inspect.getclosurevars(mask_function).nonlocals)
    if kind not in ("and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function"):
        return {kind: variables}
    parts = {}
    for inner in variables.get("mask_functions") or (variables["mask_function"],):
        parts |= _parts(inner)
    return parts


def _refuse(name: str, given: dict[str, Any], *more: str) -> None:
    for option in ("position_bias", "head_mask", "output_attentions", *more):
        if given.get(option) is not None and given[option] is not False:
            raise ValueError(f"{option}: attn_implementation=\"{name}\" does not support it; load the model with "
                             f"attn_implementation=\"{'eager' if option == 'output_attentions' else 'sdpa'}\"")


def _operands(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors as (batch, seqlen, heads, width). With autocast they get its dtype, because rotary positions may have left float32."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (x.transpose(1, 2) if dtype is None else x.transpose(1, 2).to(dtype) for x in tensors)


def _options(module: torch.nn.Module, scaling: float | None, sliding_window: int | None, is_causal: bool | None) -> dict[str, Any]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # the window of transformers includes the query's own key
    side = -1 if sliding_window is None else sliding_window - 1
    return {"causal": bool(causal), "softmax_scale": scaling, "window_size": (side, 0 if causal else side)}


def _may_cross(module: torch.nn.Module) -> bool:
    """Whether the model has attention to an encoder's tokens, which no attribute of all such layers tells."""
    config = getattr(module, "config", None)
    return any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))


def _attend(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any],
            anywhere: bool = False) -> Tensor:
    """anywhere: whether keys may be another sequence's, of which a query sees all real ones wherever it stands."""
    batch, seqlen = q.shape[:2]
    if kwargs.get("cu_seq_lens_q") is not None:
        packing = {"cu_seqlens_q": kwargs["cu_seq_lens_q"].int(), "cu_seqlens_k": kwargs["cu_seq_lens_k"].int(),
                   "max_seqlen_q": int(kwargs["max_length_q"]), "max_seqlen_k": int(kwargs["max_length_k"])}
    elif mask is not None and mask.dim() == 1:
        packing = {"cu_seqlens_q": mask, "cu_seqlens_k": mask, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
    elif mask is not None and mask.dim() == 2 and mask.dtype == torch.int64:
        raise ValueError("cu_seq_lens_q: must be given with packed sequences while a CUDA graph is captured, got None; how many sequences "
                         "position_ids begin is not known to the host then")
    else:
        return attend(q, k, v) if mask is None else _attend_padded(attend, q, k, v, mask, anywhere)
    return attend(*(x.flatten(0, 1) for x in (q, k, v)), **packing).unflatten(0, (batch, seqlen))


def _attend_padded(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor, anywhere: bool) -> Tensor:
    """mask: bool or uint8 (batch, keys), see `attention_mask`. No shape depends on the number of real tokens; the host does not wait."""
    if mask.dim() != 2 or mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"attention_mask: must be (batch, keys), one number for each token, got {tuple(mask.shape)} {mask.dtype}; "
                         "masks of pairs of tokens need attn_implementation=\"sdpa\"")
    batch, queries = q.shape[:2]
    keys = mask.shape[1]
    real = padding.token_indices(mask, max_tokens=mask.numel())
    k, v = (padding.remove_padding(x[:, :keys].contiguous(), real.indices) for x in (k, v))
    packing = {"cu_seqlens_k": real.cu_seqlens, "max_seqlen_k": keys, "max_seqlen_q": queries}
    # keys may be an encoder's tokens, so that the mask says nothing of the queries, even if there are as many
    if anywhere or queries != keys and (queries == 1 or mask.dtype == torch.uint8):
        # with a cache the queries are each sequence's last tokens; queries of padding on the left see no key
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        return attend(q.flatten(0, 1), k, v, cu_seqlens_q=cu_seqlens_q, **packing).unflatten(0, (batch, queries))
    asked = real if queries == keys else padding.token_indices(mask[:, -queries:].contiguous(), max_tokens=batch * queries)
    out = attend(padding.remove_padding(q.contiguous(), asked.indices), k, v, cu_seqlens_q=asked.cu_seqlens, **packing)
    return padding.pad_input(out, asked.indices, batch, queries)


FUNCTIONS = {"attnzoo_flash": flash, "attnzoo_block_sparse": block_sparse}
