"""Attention dropout's mask by Philox4x32-7 (Salmon et al. 2011), indexed by position: the kernels' mask in plain PyTorch.

Element (b, h, i, j) reads a 15-bit field of the four words of philox(key=seed, counter=(j', i', b * heads + h, offset)). i' is i without
its bit 3, and j' is j without its bits 4, 3 and 0; these four bits choose the field. So the mask depends neither on tiles nor on lengths,
and one call of Philox serves 16 elements, which one thread of a matrix product holds. The fields are the two halves of a word, and of the
word rotated by a byte, each without its highest bit. The upper seven bits of the four fields are different bits of the word; the lower
eight bits of a field contain the upper seven of another one. Each element is kept with the exact probability, a multiple of 2**-15. Two
elements that share bits are nearly independent: their covariance is below 2**-8. Seven rounds are the fewest with which Philox passed
BigCrush in its authors' tests.
"""

import torch
from torch import Tensor

from attnzoo_kernels import checks

_MASK32 = 0xFFFFFFFF


def new_rng_state(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Seed and offset, (2,) int64 on the device, drawn from `generator`, or from torch's own of that device (no host synchronisation)."""
    return torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


def check_state(name: str, state: Tensor, like: Tensor, sequences: int) -> None:
    """Raises where `state` is not seed and offset, and perhaps each sequence's first row, on the device of `like`."""
    checks.tensor(name, state, "an int64 tensor")
    if state.dtype != torch.int64:
        raise TypeError(f"{name}: must be an int64 tensor, got {state.dtype}")
    if tuple(state.shape) not in ((2,), (2 + sequences,)):
        raise ValueError(f"{name}: must have shape (2,) or {(2 + sequences,)}, got {tuple(state.shape)}")
    if state.device != like.device:
        raise ValueError(f"{name}: must be on the device {like.device}, got {state.device}")
    if state.stride(0) != 1:
        raise ValueError(f"{name}: must be contiguous, got stride {state.stride(0)}; call .contiguous()")


def drop_threshold(dropout_p: float) -> int:
    """Elements whose field is below this are dropped; the probability of being kept is 1 - threshold / 32768."""
    return min(round(dropout_p * 32768), 32767)


def philox(seed: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Philox4x32-7 on int64 tensors that hold uint32 values: four words per counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(7):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((high >> 32) & _MASK32) ^ c1 ^ k0, high & _MASK32, ((low >> 32) & _MASK32) ^ c3 ^ k1, low & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return [c0, c1, c2, c3]


def keep_mask(rng_state: Tensor, dropout_p: float, shape: tuple[int, int, int, int],
              corner: tuple[int, int, int] = (0, 0, 0)) -> tuple[Tensor, float]:
    """Which attention weights are kept: bool (batch, heads, queries, keys), and the probability of being kept.

    rng_state: seed and offset, and perhaps for each sequence the row of its mask that its first query has.
    corner: the first (batch * heads) index, query and key, for a part of the whole mask. rng_state has the rows of all sequences then.
    """
    batch, heads, rows, columns = shape
    device = rng_state.device
    seed, offset = rng_state[0], rng_state[1] & _MASK32
    i = torch.arange(rows, device=device).view(1, -1, 1) + corner[1]
    j = torch.arange(columns, device=device).view(1, 1, -1) + corner[2]
    head = torch.arange(batch * heads, device=device).view(-1, 1, 1) + corner[0]
    if rng_state.shape[0] > 2:
        i = i + rng_state[2:][head // heads]
    zero = torch.zeros((batch * heads, rows, columns), dtype=torch.int64, device=device)
    words = philox(seed, [(j // 32 * 4 + j // 2 % 4) + zero, (i // 16 * 8 + i % 8) + zero, head + zero, offset + zero])
    word = torch.stack(words).gather(0, (i // 8 % 2 * 2 + j // 8 % 2 + zero)[None]).squeeze(0)
    word = torch.where(j // 16 % 2 == 1, (word << 8 | word >> 24) & _MASK32, word)
    threshold = drop_threshold(dropout_p)
    keep = (word >> j % 2 * 16 & 0x7FFF) >= threshold
    return keep.view(shape), 1 - threshold / 32768
