"""What decoding keeps of the tokens that were read."""

from torch import Tensor


class KVCache:
    """What `Attention.kept` gives of the tokens read so far, each (batch, max_len, ...). Takes its memory at the first append."""

    def __init__(self, batch: int, max_len: int):
        self.batch, self.max_len, self.length = batch, max_len, 0
        self.buffers: tuple[Tensor, ...] = ()

    @property
    def keys(self) -> Tensor:
        return self.buffers[0]

    @property
    def values(self) -> Tensor:
        return self.buffers[1]

    def append(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add what is kept of new tokens, (batch, new tokens, ...); return all so far, as views."""
        end = self.length + new[0].shape[1]
        if new[0].shape[0] != self.batch or end > self.max_len:
            raise ValueError(f"cache: made for batch={self.batch}, max_len={self.max_len}, got batch={new[0].shape[0]} and {end} tokens")
        if not self.buffers:
            self.buffers = tuple(x.new_empty(self.batch, self.max_len, *x.shape[2:]) for x in new)
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer[:, self.length : end] = x
        self.length = end
        return self.read()

    def read(self) -> tuple[Tensor, ...]:
        """What was appended so far, as views."""
        return tuple(buffer[:, : self.length] for buffer in self.buffers)
