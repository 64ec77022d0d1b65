"""Shapes of `block_sparse_attention`: inputs, counted work and identifiers, shared by the tests and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels.block_sparse.layout import BlockLayout
from attnzoo_kernels.flash import cases as flash


class Inputs(NamedTuple):
    """What one call takes: `block_sparse_attention(q, k, v, layout, **options)`, then `out.backward(dout)`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    layout: BlockLayout
    options: dict[str, Any]


@dataclass(frozen=True)
class Case(flash.Case):
    """One problem over random blocks; fields as in `flash.cases.Case`. If block_k is None, it equals block_q.

    density: probability with which a block is kept. diagonal: blocks on the diagonal are kept, too. masks: "one" layout for all, one for
    each "head", or one for each head of each "sequence". holes: a row and a column of blocks are dropped.
    """

    block_q: int = 64
    block_k: int | None = None
    density: float = 0.5
    diagonal: bool = False
    masks: str = "one"
    holes: bool = False

    @cached_property
    def mask(self) -> Tensor:
        """bool (batch or 1, heads or 1, q_blocks, k_blocks), on the CPU. It is the same each time."""
        longest_q, longest_k = (max(side) for side in zip(*self.lengths, strict=True))
        blocks = -(-longest_q // self.block_q), -(-longest_k // (self.block_k or self.block_q))
        batch = len(self.lengths) if self.masks == "sequence" else 1
        heads = 1 if self.masks == "one" else self.heads
        mask = torch.rand(batch, heads, *blocks, generator=torch.Generator().manual_seed(3)) < self.density
        if self.diagonal:
            mask |= torch.eye(*blocks, dtype=torch.bool)
        if self.holes:
            mask[..., blocks[0] // 2, :] = mask[..., :, blocks[1] // 3] = False
        return mask

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head, over the batch; the mean over the heads."""
        masks = self.mask.double().mean(1).expand(len(self.lengths), -1, -1)
        return sum(self._pairs(mask, *lengths) for mask, lengths in zip(masks, self.lengths, strict=True))

    def _pairs(self, mask: Tensor, m: int, n: int) -> float:
        block_k = self.block_k or self.block_q
        left, right = self.window_size[0], 0 if self.causal else self.window_size[1]
        diagonal = torch.arange(m)[:, None] + n - m
        start = torch.arange(mask.shape[1]) * block_k
        first = start.expand(m, -1) if left < 0 else torch.maximum(start, diagonal - left)
        end = (start + block_k).clamp(max=n).expand(m, -1)
        end = end if right < 0 else torch.minimum(end, diagonal + right + 1)
        return float(((end - first).clamp(min=0) * mask[torch.arange(m) // self.block_q]).sum())

    @property
    def kept(self) -> float:
        """The share that the layout keeps of the blocks with a visible pair. Lengths are the first sequence's; windows are ignored."""
        m, n = self.lengths[0]
        block_k = self.block_k or self.block_q
        row, column = torch.arange(self.mask.shape[-2])[:, None], torch.arange(self.mask.shape[-1])
        last = ((row + 1) * self.block_q).clamp(max=m) - 1
        touched = column * block_k <= last + n - m if self.causal else row + column >= 0
        return (self.mask & touched).sum().item() / self.mask.shape[0] / self.mask.shape[1] / touched.sum().item()

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> Inputs:
        """Standard normal tensors in the operator's layout, the block layout and the options of the call."""
        q, k, v, dout, options = super().inputs(device, seed)
        options = {name: value for name, value in options.items() if name not in ("softcap", "dropout_p")}
        return Inputs(q, k, v, dout, BlockLayout.from_mask(self.mask.to(device), self.block_q, self.block_k), options)

    def __str__(self) -> str:
        if self.packed:
            parts = [f"packed{len(self.lengths_q)}x{max(self.lengths_q)}"]
            if self.lengths_k:
                parts.append(f"k{max(self.lengths_k)}")
        else:
            parts = [f"b{self.batch}", f"n{self.seqlen_q}"]
            if self.seqlen_k is not None:
                parts.append(f"k{self.seqlen_k}")
        parts.append(f"h{self.heads}" + (f"kv{self.kv_heads}" if self.kv_heads else ""))
        parts.append(f"d{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else ""))
        parts.append(f"blocks{self.block_q}" + (f"x{self.block_k}" if self.block_k else ""))
        parts += [f"density{self.density:g}", "causal" if self.causal else "full"]
        parts += ["window{},{}".format(*self.window_size)] if self.window_size != (-1, -1) else []
        parts += [f"by-{self.masks}"] if self.masks != "one" else []
        parts += [name for name in ("diagonal", "holes", "strided") if getattr(self, name)]
        parts += [f"scale{self.q_scale:g}"] if self.q_scale != 1 else []
        parts.append(str(self.dtype).removeprefix("torch."))
        return "-".join(parts)


CORRECTNESS: tuple[Case, ...] = (
    *(Case(seqlen_q=n, block_q=16, causal=causal) for n in (17, 97, 1025) for causal in (False, True)),
    *(Case(batch=4, heads=16, seqlen_q=1, block_q=16, density=1.0, causal=causal) for causal in (False, True)),  # see SINGLE_ROWS
    *(Case(seqlen_q=113, seqlen_k=145, heads=1, block_q=m, block_k=n, causal=True, masks="head")
      for m, n in ((16, 32), (32, 16), (16, 256), (64, 16), (128, 64), (32, 32), (256, 128))),
    Case(seqlen_q=257, seqlen_k=113, block_q=16, causal=True),  # most rows see no key
    Case(seqlen_q=17, seqlen_k=257, block_q=16, causal=True),
    Case(batch=2, seqlen_q=113, heads=6, kv_heads=2, block_q=32, masks="sequence", holes=True, causal=True),
    Case(batch=2, seqlen_q=113, heads=4, kv_heads=1, block_q=16, masks="head", holes=True),
    Case(batch=2, seqlen_q=113, heads=4, kv_heads=2, block_q=32, strided=True, causal=True),
    Case(seqlen_q=160, block_q=32, density=0.0),
    Case(seqlen_q=160, block_q=32, density=1.0, causal=True),
    Case(seqlen_q=113, block_q=16, q_scale=50.0, causal=True),
    Case(seqlen_q=193, block_q=32, window_size=(70, 40), density=0.8),
    Case(seqlen_q=113, seqlen_k=193, block_q=16, window_size=(64, -1), causal=True),
    *(Case(seqlen_q=97, heads=1, head_dim=d, block_q=32, causal=True) for d in (40, 96, 111, 256)),
    Case(seqlen_q=113, heads=1, head_dim=40, value_dim=111, block_q=16, causal=True),
    *(Case(lengths_q=(1, 0, 97, 17, 130, 0), block_q=16, causal=causal, masks="head") for causal in (False, True)),
    *(Case(lengths_q=(97, 130), block_q=64, density=0.7, causal=causal) for causal in (False, True)),
    *(Case(lengths_q=(97, 130), heads=4, kv_heads=2, head_dim=64, value_dim=dv, block_q=64, density=0.7, causal=True) for dv in (16, 32)),
    Case(lengths_q=(17, 0, 113, 5), lengths_k=(97, 33, 17, 0), heads=4, kv_heads=2, block_q=32, block_k=16, masks="sequence", causal=True),
    Case(lengths_q=(97, 113), lengths_k=(130, 70), heads=4, kv_heads=2, block_q=16, window_size=(48, 24), strided=True),
)


def benchmark_case(seqlen: int, density: float, block: int = 128, head_dim: int = 128, heads: int = 16, batch: int = 1,
                   **changes: Any) -> Case:
    """A causal case. The blocks of each head are drawn at random; those on the diagonal are kept, too."""
    return Case(batch=batch, seqlen_q=seqlen, heads=heads, head_dim=head_dim, block_q=block, density=density, diagonal=True, masks="head",
                causal=True, **changes)
