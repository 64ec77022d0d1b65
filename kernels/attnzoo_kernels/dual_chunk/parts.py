"""The rotated copies are scratch: a call whose copies would be very large runs in parts, by batch rows and then by key heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from attnzoo_kernels.dual_chunk.options import Extras, Options

SCRATCH = 2**31  # bytes of copies at which a call is cut; one key head of one batch row is never cut


@dataclass(frozen=True)
class Part:
    """Views of a call's tensors: batch rows `batch` (None where packed) and key heads begin .. end of kv_heads."""

    batch: slice | None
    begin: int
    end: int
    kv_heads: int
    extras: Extras

    def heads(self, heads: int) -> slice:
        group = heads // self.kv_heads
        return slice(self.begin * group, self.end * group)

    def tokens(self, x: Tensor | None) -> Tensor | None:
        """Of (batch, seqlen, heads, width) or (total, heads, width)."""
        if x is None:
            return None
        x = x[..., self.heads(x.shape[-2]), :]
        return x if self.batch is None else x[self.batch]

    def rows(self, x: Tensor | None) -> Tensor | None:
        """Of (..., batch, heads, seqlen) or (..., heads, total); lies in one piece but for the leading dimensions."""
        if x is None:
            return None
        x = x[..., self.heads(x.shape[-2]), :]
        return x if self.batch is None else x[..., self.batch, :, :]


def parts(q: Tensor, k: Tensor, extras: Extras, options: Options, sums: int = 0) -> Iterator[Part]:
    """The whole call where its copies fit into SCRATCH; else as many batch rows, or of one row as many key heads, as do.

    sums: bytes of scratch for each of q's elements beside the copies."""
    kv_heads = k.shape[-2]
    copies = q.element_size() * (3 * q.numel() + options.key_copies * k.numel()) + sums * q.numel()
    batches = None if options.packed else q.shape[0]
    if copies <= SCRATCH:
        yield Part(None, 0, kv_heads, kv_heads, extras)
        return
    per_row = copies // (batches or 1)
    rows = max(SCRATCH // per_row, 1)
    heads = kv_heads if per_row <= SCRATCH else max(SCRATCH // (per_row // kv_heads), 1)
    for row in range(0, batches or 1, rows):
        batch = None if batches is None else slice(row, min(row + rows, batches))
        multiplier = extras.logit_multiplier
        if batch is not None and multiplier is not None and multiplier.dim() == 2:
            multiplier = multiplier[batch]
        for head in range(0, kv_heads, heads):
            yield Part(batch, head, min(head + heads, kv_heads), kv_heads, extras._replace(logit_multiplier=multiplier))
