"""The KV cache: what decoding keeps of the tokens that it has read."""

import torch
from torch import Tensor

PAGE = 64  # tokens in a page
# layers use the decoding kernel, which splits the keys, for at most this many new tokens per row; more occupy the GPU without splitting
DECODED_TOKENS = 16


class Newest:
    """Where the newest token of each row is. Only the device knows these numbers, so that one CUDA graph serves every step of decoding.

    positions: int64 (batch,), the number of tokens before the newest one. lengths: int32 (batch,), that number plus one. places: int64
    (batch,), the newest token's index in the cache when its rows of max_len tokens are flattened into one dimension.
    """

    def __init__(self, positions: Tensor, max_len: int):
        self.positions, self.max_len = positions, max_len
        self.places = self.row_starts + positions
        self.lengths = (positions + 1).int()

    @property
    def row_starts(self) -> Tensor:
        return torch.arange(self.positions.shape[0], device=self.positions.device) * self.max_len

    def last_windows(self, size: int, stride: int, room: int) -> tuple[Tensor, Tensor]:
        """For each row's last whole window of `size` tokens, where windows start `stride` tokens apart: its tokens, (batch, size), as
        indices like `places`; and its index, (batch,), in a tensor that has room for `room` windows of each row.

        A row without a whole window gets its first one. What is computed from it is overwritten when that window is whole.
        """
        last = ((self.lengths.long() - size) // stride).clamp(min=0)
        tokens = (self.row_starts + last * stride)[:, None] + torch.arange(size, device=last.device)
        rows = torch.arange(last.shape[0], device=last.device)
        return tokens.clamp(max=last.shape[0] * self.max_len - 1), rows * room + last

    def packed(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens of queries and of keys, each int32 (2 batch + 1,), that describe a cache's rows as packed sequences.

        Each row makes two sequences: its newest token with the row's keys, and the unused rest of the row, which has no query.
        """
        batch = self.positions.shape[0]
        queries = torch.arange(1, 2 * batch + 2, device=self.positions.device) // 2
        starts = self.row_starts
        keys = torch.stack((starts, starts + self.lengths), dim=1).flatten()
        return queries.int(), torch.cat((keys, starts[-1:] + self.max_len)).int()


class KVCache:
    """The tensors of `Attention.kept` for the tokens read so far, each (batch, max_len, ...). Memory is allocated at the first append.

    derived: what a variant has computed from the buffers for later tokens, each (batch, ...); empty for most variants.
    rotated: whether the keys, which a variant may cache before the rotation, have been rotated in place.
    newest: if set, each append writes one token per row, at `newest.places`, and `length` is ignored.
    block_table: if set, rows with a common prefix read it from the pages of one of them. int32 (batch, max_len / PAGE): page numbers into
    `pages()`. A variant with `reads_pages` reads by this table. Each row's own buffer still holds the whole row.
    """

    def __init__(self, batch: int, max_len: int):
        self.batch, self.max_len, self.length = batch, max_len, 0
        self.buffers: tuple[Tensor, ...] = ()
        self.derived: tuple[Tensor, ...] = ()
        self.newest: Newest | None = None
        self.block_table: Tensor | None = None
        self.rotated = False

    @property
    def keys(self) -> Tensor:
        return self.buffers[0]

    @property
    def values(self) -> Tensor:
        return self.buffers[1]

    def append(self, *new: Tensor) -> None:
        """Adds the `kept` tensors of new tokens, each (batch, new tokens, ...). Raises ValueError for another batch, or beyond max_len."""
        end = self.length + new[0].shape[1]
        if self.newest is not None:
            for buffer, x in zip(self.buffers, new, strict=True):
                buffer.flatten(0, 1).index_copy_(0, self.newest.places, x.flatten(0, 1).to(buffer.dtype))
            return
        if new[0].shape[0] != self.batch or end > self.max_len:
            raise ValueError(f"cache: made for batch={self.batch}, max_len={self.max_len}, got batch={new[0].shape[0]} and {end} tokens")
        if not self.buffers:
            # zeros, not uninitialised memory: a mask gives unused values the weight 0, and 0 times NaN would be NaN
            self.buffers = tuple(x.new_zeros(self.batch, self.max_len, *x.shape[2:]) for x in new)
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, self.length : end] = x
        self.length = end

    def last(self, buffer: Tensor) -> Tensor:
        """The entry of each row's last token in one of the buffers, (batch, 1, ...)."""
        if self.newest is None:
            return buffer[:, self.length - 1 : self.length]
        return buffer.flatten(0, 1).index_select(0, self.newest.places - 1)[:, None]

    def take(self, rows: Tensor) -> None:
        """Replaces the cache's rows by these, integer indices (new batch,), in the given order. A row that is named twice is copied."""
        self.buffers, self.derived = (tuple(x.index_select(0, rows) for x in tensors) for tensors in (self.buffers, self.derived))
        self.batch, self.block_table = rows.shape[0], None

    def read(self) -> tuple[Tensor, ...]:
        """The buffers up to the last token appended, as views."""
        return tuple(buffer[:, : self.length] for buffer in self.buffers)

    def pages(self, size: int | None = None) -> tuple[Tensor, ...]:
        """The buffers as (pages, size, ...), views. size: a divisor of max_len, None for PAGE."""
        return tuple(buffer.view(-1, size or PAGE, *buffer.shape[2:]) for buffer in self.buffers)


def block_table(batch: int, max_len: int, alike: list[tuple[Tensor, Tensor | int]], device: torch.device) -> Tensor:
    """`KVCache.block_table` for rows with common prefixes. alike: pairs (first, tokens): row i reads the whole pages of its first tokens[i]
    tokens from row first[i]; a later pair overrides an earlier one."""
    n_pages = max_len // PAGE
    column = torch.arange(n_pages, device=device)
    rows = torch.arange(batch, device=device)[:, None].expand(-1, n_pages)
    for first, tokens in alike:
        whole = torch.as_tensor(tokens, device=device).expand(batch) // PAGE
        rows = torch.where(column < whole[:, None], first[:, None], rows)
    return (rows * n_pages + column).int()
