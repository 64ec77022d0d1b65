"""The order of pairs of the forward by slabs: whoever computes its items and merges their parts has the operator's result."""

from dataclasses import replace

import pytest
import torch
from test_routed import DEVICE, needs_triton
from torch.testing import assert_close

from attnzoo_kernels import routed_attention
from attnzoo_kernels.routed.cases import CORRECTNESS
from attnzoo_kernels.routed.routes import Blocks

CASES = [replace(CORRECTNESS[n], dtype=torch.float32) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def parts_of(q, k, v, order, item, unit):
    """Where the parts of an item begin, their outputs and LSEs."""
    key, keys, first, rows, seen, before = item[:6].tolist()
    row, each = first + torch.arange(rows), order.rows * order.group
    chooser = order.pair[unit * order.pairs + row // order.rows]
    token = unit % order.slabs * order.slab + chooser // order.group
    head = unit // order.slabs * each + chooser % order.group * order.rows + row % order.rows
    scores = q[token, head] @ k[key:key + keys, unit // order.slabs].T * q.shape[-1] ** -0.5
    visible = (seen + (before + torch.arange(rows)) // each).clamp(max=keys)
    scores = scores.masked_fill(torch.arange(keys) >= visible[:, None], -torch.inf)
    return first, scores.softmax(-1) @ v[key:key + keys, unit // order.slabs], scores.logsumexp(-1)


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_items_and_places_give_the_output(case, poisoned):
    from attnzoo_kernels.routed.slabs import ITEM, Tile, launch_order

    x = case.inputs(DEVICE)
    cu_seqlens = (x.options.get(f"cu_seqlens_{name}") for name in "qk")
    layout = Blocks.of(x.q, x.k, *cu_seqlens, case.block_size)
    q, k, v, blocks = (t.flatten(0, -3) for t in (x.q, x.k, x.v, x.blocks))
    tile = Tile(1, 0, slab_rows=64, slab_pairs=256, block_m=16, steps=2, order_block=64)
    order = launch_order(blocks, layout.first, layout.bounds_q, layout.bounds_k, layout.sequence, layout.own, q.shape[1], k.shape[1], tile)
    order = order._replace(**{name: getattr(order, name).cpu().long() for name in ("pair", "place", "item", "items")})
    q, k, v = (t.cpu().double() for t in (q, k, v))
    (tokens, heads, _), slots, each = q.shape, blocks.shape[-1] + 1, order.rows * order.group
    out, lse = q.new_full((tokens, heads, v.shape[-1]), torch.nan), q.new_full((heads, tokens), torch.nan)
    for unit, (items, places) in enumerate(zip(order.item.view(order.units, order.capacity, ITEM.value),
                                               order.place.view(order.units, -1, slots), strict=True)):
        part, part_lse = q.new_full((order.pairs * order.rows, v.shape[-1]), torch.nan), q.new_full((order.pairs * order.rows,), torch.nan)
        for item in items[:order.items[unit]]:
            first, values, sums = parts_of(q, k, v, order, item, unit)
            part[first:first + len(sums)], part_lse[first:first + len(sums)] = values, sums
        begin = unit % order.slabs * order.slab
        row = torch.arange(min(order.slab, tokens - begin) * each)
        place = places[row // order.rows]
        at = place.clamp(min=0) * order.rows + (row % order.rows)[:, None]
        lses = part_lse[at].masked_fill(place < 0, -torch.inf)
        token, head = begin + row // each, unit // order.slabs * each + row % each
        lse[head, token] = lses.logsumexp(-1)
        weights = (lses - lses.logsumexp(-1, keepdim=True)).exp().masked_fill(place < 0, 0)
        out[token, head] = (weights[:, :, None] * part[at].masked_fill((place < 0)[:, :, None], 0)).sum(1)
    doubles = (t.double() for t in x[:3])
    wanted, wanted_lse = routed_attention(*doubles, x.blocks, return_lse=True, impl="reference", **x.options)
    assert_close(out, wanted.flatten(0, -3).cpu(), atol=1e-5, rtol=0)
    assert_close(lse, (wanted_lse.transpose(0, 1).flatten(1) if wanted_lse.dim() == 3 else wanted_lse).cpu().double(), atol=1e-5, rtol=0)
