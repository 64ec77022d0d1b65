"""transformers' engine, `generate_batch`, with attnzoo_flash: new tokens read keys and values directly from the engine's pages.

By itself the engine hands its block table to flash-attn only, and not for layers with a window. The pages of such a layer are a ring buffer
that holds exactly the keys that the newest query sees. The order of keys does not matter to attention, so that they are read as they lie.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from attnzoo.hub.own_configs import own_configs
from attnzoo_kernels import decode_attention

NAME = "attnzoo_flash"


def use_pages(model: torch.nn.Module, *, share_prefixes: bool = False, gather: bool = False) -> torch.nn.Module:
    """Chooses how `generate_batch` with attnzoo_flash reads the engine's pages, in place; returns the model.

    By default, with transformers 5.20 or later, batches with one new token of each text read the pages in place. Batches that contain
    prompts gather keys and values from the pages.

    share_prefixes: pages that several texts begin with are read once (`decode_attention(share_prefixes=True)`). This is meant for many
        samples of long prompts; it costs time if little is shared.
    gather: all batches gather, as with other attention.

    The model gets its own copy of its config, and the choice is written there as `attnzoo_pages`. An engine that the model already keeps
    does not change; `model.destroy_cached_continuous_batching_manager()` removes it.
    """
    own_configs(model)
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config.attnzoo_pages = {"share_prefixes": share_prefixes, "gather": gather}
    return model


def _chosen(config: Any, option: str) -> bool:
    return (getattr(config, "attnzoo_pages", None) or {}).get(option, False)


def _in_pages(config: Any) -> bool:
    return config._attn_implementation == NAME and not _chosen(config, "gather")


def register() -> None:
    """Makes the engine hand over its block table for batches with one new token of each text. Does nothing before transformers 5.20, whose
    pages are different."""
    from transformers.generation.continuous_batching import PagedAttentionCache, initialization

    asked = initialization.ensure_decode_fast_path_is_available
    allocators = getattr(initialization, "ATTN_TYPE_TO_ALLOCATOR", None)
    if allocators is None or hasattr(asked, "__wrapped__"):
        return

    @functools.wraps(asked)
    def ensure_decode_fast_path_is_available(config: Any, *arguments: Any, **options: Any) -> None:
        known = {"full_attention", "sliding_attention"}.issuperset(initialization.group_layers_by_attn_type(config))
        if not (known and _in_pages(config)):
            asked(config, *arguments, **options)

    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available
    ring, pages = allocators["sliding_attention"], allocators["full_attention"]

    class SlidingAttentionCacheAllocator(ring):
        """The allocator of ring buffers, with the block table by which attnzoo_flash reads their pages."""

        def __init__(self, *arguments: Any, config: Any, **options: Any):
            super().__init__(*arguments, config=config, **options)
            self.supports_block_table = _in_pages(config)

        fill_block_table = pages.fill_block_table
        get_cache_for_block_table = pages.get_cache_for_block_table

    allocators["sliding_attention"] = SlidingAttentionCacheAllocator
    update = PagedAttentionCache.update

    @functools.wraps(update)
    @torch.compiler.disable  # as the function that it wraps
    def leave_pages(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """From transformers 5.24 on, layers call this instead of attention. If attention reads pages, it also writes the new keys there."""
        if kwargs.get("block_table") is None or not _in_pages(self.config):
            return update(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    PagedAttentionCache.update = leave_pages


@torch.compiler.disable  # as PagedAttentionCache.update: the layers' pages are views of one tensor, which a compiled step would copy
def decode(module: torch.nn.Module, cache: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Attention of one new token of each text, (1, texts, heads, head_dim), over its pages, to which its key and value are added first.

    given: the arguments that the engine hands to all layers. options: those of `decode_attention`.
    """
    allocator = cache.layer_to_allocator[module.layer_idx]
    pages = allocator.get_cache_for_block_table(module.layer_idx)
    ring = getattr(allocator, "sliding_window", None)
    table, of_step = given["block_table"][allocator.index], given["cu_seq_lens_k"]
    name = f"attnzoo {allocator.layer_type}"
    if module.layer_idx == allocator.layer_indices[0] or name not in of_step:
        lengths = of_step[allocator.layer_type].diff()
        newest = (lengths - 1).clamp(min=0) if ring is None else given["position_ids"][0] % ring
        of_step[name] = lengths, _places(newest, lengths, table, pages[0].shape[1], allocator.write_trash_index)  # for all its layers
    lengths, places = of_step[name]
    q, k, v = (x.transpose(0, 1).to(pages[0].dtype) for x in (q, k, v))
    if q.is_cuda:
        from attnzoo_kernels.decode.append import append_rotated

        q = append_rotated(q, k, v, None, None, *pages, places)
    else:
        for page, new in zip(pages, (k, v), strict=True):
            page.flatten(0, 1).index_copy_(0, places, new[:, 0])
    share = ring is None and options["window_size"][0] < 0 and _chosen(module.config, "share_prefixes")
    if ring is not None:
        options = options | {"window_size": (-1, -1)}
    return decode_attention(q, *pages, cache_seqlens=lengths, block_table=table, share_prefixes=share, **options).transpose(0, 1)


def _places(newest: Tensor, lengths: Tensor, table: Tensor, page: int, nowhere: int) -> Tensor:
    """The index of each text's place `newest` in the concatenation of all pages; `nowhere` for an empty text."""
    newest = newest.long()
    places = table.gather(1, (newest // page)[:, None])[:, 0].long() * page + newest % page
    return places.masked_fill(lengths <= 0, nowhere)
