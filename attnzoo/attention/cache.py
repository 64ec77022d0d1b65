"""What decoding keeps of the tokens that were read."""

import torch
from torch import Tensor

PAGE = 64  # tokens
DECODED_TOKENS = 16  # of one sequence at once, at most; a longer piece of a prompt keeps the GPU busy without splitting its keys


class Newest:
    """The newest token of each row, where only the device knows how many came before it, so that a CUDA graph can go on with it.

    positions: int64 (batch,), tokens before it. lengths: int32 (batch,), tokens with it. places: int64 (batch,), where it stands in a
    cache's rows of max_len tokens, one behind the other.
    """

    def __init__(self, positions: Tensor, max_len: int):
        self.positions, self.max_len = positions, max_len
        self.places = self.row_starts + positions
        self.lengths = (positions + 1).int()

    @property
    def row_starts(self) -> Tensor:
        return torch.arange(self.positions.shape[0], device=self.positions.device) * self.max_len

    def packed(self) -> tuple[Tensor, Tensor]:
        """cu_seqlens of queries and keys, int32 (2 batch + 1,), that make packed sequences of a cache's rows: a row's newest token and
        its keys, and then, without a query, what the row has not used yet."""
        batch = self.positions.shape[0]
        queries = torch.arange(1, 2 * batch + 2, device=self.positions.device) // 2
        starts = self.row_starts
        keys = torch.stack((starts, starts + self.lengths), dim=1).flatten()
        return queries.int(), torch.cat((keys, starts[-1:] + self.max_len)).int()


class KVCache:
    """What `Attention.kept` gives of the tokens read so far, each (batch, max_len, ...). Takes its memory at the first append.

    rotated: whether a variant that keeps keys as they were projected has rotated them by now, in place.
    newest: set, the cache takes one token of each row at the place that it says, and `length` is not looked at.
    block_table: set, rows that begin alike read their beginnings in the pages of one of them: int32 (batch, max_len / PAGE), numbers of
    pages of all rows, one behind the other. A variant with `reads_pages` reads `pages()` by it; what each row has of its own is the same.
    """

    def __init__(self, batch: int, max_len: int):
        self.batch, self.max_len, self.length = batch, max_len, 0
        self.buffers: tuple[Tensor, ...] = ()
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
        """Add what is kept of new tokens, (batch, new tokens, ...)."""
        end = self.length + new[0].shape[1]
        if self.newest is not None:
            for buffer, x in zip(self.buffers, new, strict=True):
                buffer.flatten(0, 1).index_copy_(0, self.newest.places, x.flatten(0, 1).to(buffer.dtype))
            return
        if new[0].shape[0] != self.batch or end > self.max_len:
            raise ValueError(f"cache: made for batch={self.batch}, max_len={self.max_len}, got batch={new[0].shape[0]} and {end} tokens")
        if not self.buffers:
            # zeros: a mask gives unused values no weight, which of NaN would be NaN
            self.buffers = tuple(x.new_zeros(self.batch, self.max_len, *x.shape[2:]) for x in new)
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, self.length : end] = x
        self.length = end

    def last(self, buffer: Tensor) -> Tensor:
        """What one of the buffers has of each row's last token so far, (batch, 1, ...)."""
        if self.newest is None:
            return buffer[:, self.length - 1 : self.length]
        return buffer.flatten(0, 1).index_select(0, self.newest.places - 1)[:, None]

    def take(self, rows: Tensor) -> None:
        """Go on with these rows, whole numbers (batch,), in their order. A row that is named more than once is copied."""
        self.buffers = tuple(buffer.index_select(0, rows) for buffer in self.buffers)
        self.batch, self.block_table = rows.shape[0], None

    def read(self) -> tuple[Tensor, ...]:
        """What was appended so far, as views."""
        return tuple(buffer[:, : self.length] for buffer in self.buffers)

    def pages(self, size: int | None = None) -> tuple[Tensor, ...]:
        """The buffers as (pages, size, ...), views. size: a divisor of max_len, None for PAGE."""
        return tuple(buffer.view(-1, size or PAGE, *buffer.shape[2:]) for buffer in self.buffers)


def block_table(batch: int, max_len: int, alike: list[tuple[Tensor, Tensor | int]], device: torch.device) -> Tensor:
    """`KVCache.block_table` of rows that begin alike: each pair is the row (batch,) whose pages a row reads, and of how many tokens."""
    n_pages = max_len // PAGE
    column = torch.arange(n_pages, device=device)
    rows = torch.arange(batch, device=device)[:, None].expand(-1, n_pages)
    for first, tokens in alike:
        whole = torch.as_tensor(tokens, device=device).expand(batch) // PAGE
        rows = torch.where(column < whole[:, None], first[:, None], rows)
    return (rows * n_pages + column).int()
