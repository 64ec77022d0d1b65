"""Published sparsity patterns as block layouts, each on a grid of square blocks: distances, windows and strides count blocks.

All take `seqlen` in tokens (queries and keys), `block` in tokens, `causal` (blocks above the diagonal are dropped; those on it are cut by
the element mask) and `device`. A layout is prefix-stable, pattern(n)[:m, :m] == pattern(m) for m blocks, except with `last_global`: what a
block sees does not depend on later tokens. So decoding token by token equals one call, and packed sequences equal single ones.
"""

import inspect
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from attnzoo_kernels import checks
from attnzoo_kernels.block_sparse.layout import BlockLayout, check_block
from attnzoo_kernels.block_sparse.layout_cache import LayoutCache
from attnzoo_kernels.dropout import philox

Device = torch.device | str


def dense(seqlen: int, *, block: int = 64, causal: bool = True, device: Device = "cpu") -> BlockLayout:
    """Every block."""
    row, column = _grid(seqlen, block, device)
    return _layout((row >= 0) & (column >= 0), block, causal)


def sliding_window(seqlen: int, *, window: int = 2, block: int = 64, causal: bool = True, device: Device = "cpu") -> BlockLayout:
    """A block sees itself and `window` blocks on each side."""
    _at_least(0, window=window)
    row, column = _grid(seqlen, block, device)
    return _layout((row - column).abs() <= window, block, causal)


def dilated(seqlen: int, *, window: int = 2, dilation: int = 2, block: int = 64, causal: bool = True,
            device: Device = "cpu") -> BlockLayout:
    """A sliding window with gaps: itself and `window` blocks on each side, every `dilation`-th one (Longformer, arXiv:2004.05150)."""
    _at_least(0, window=window)
    _at_least(1, dilation=dilation)
    row, column = _grid(seqlen, block, device)
    distance = (row - column).abs()
    return _layout((distance <= window * dilation) & (distance % dilation == 0), block, causal)


def global_tokens(seqlen: int, *, n_global: int = 1, last_global: bool = False, block: int = 64, causal: bool = True,
                  device: Device = "cpu") -> BlockLayout:
    """The first `n_global` blocks (with last_global, bidirectional only, the last one too) see all and are seen by all."""
    _at_least(0, n_global=n_global)
    checks.flag("last_global", last_global)
    if last_global and causal:
        raise ValueError("last_global: the last block of a causal layout sees later ones; it must be False, or causal=False")
    row, column = _grid(seqlen, block, device)
    kept = (row < n_global) | (column < n_global)
    if last_global:
        kept = kept | (row == row.numel() - 1) | (column == row.numel() - 1)
    return _layout(kept, block, causal)


def longformer(seqlen: int, *, window: int = 2, n_global: int = 1, block: int = 64, causal: bool = True,
               device: Device = "cpu") -> BlockLayout:
    """Sliding window and global blocks at the beginning (Beltagy et al. 2020, arXiv:2004.05150)."""
    common = {"block": block, "causal": causal, "device": device}
    return sliding_window(seqlen, window=window, **common) | global_tokens(seqlen, n_global=n_global, **common)


def bigbird(seqlen: int, *, window: int = 1, n_global: int = 1, n_random: int = 3, last_global: bool = False, heads: int = 1, seed: int = 0,
            block: int = 64, causal: bool = True, device: Device = "cpu") -> BlockLayout:
    """Window, global blocks, and random ones for each head and row (Zaheer et al. 2020, arXiv:2007.14062).

    A row's `n_random` blocks (all, where there are fewer) are drawn by seed, head and row without replacement among the columns before the
    row that are neither global nor in its window; a bidirectional layout is joined with the mirror image of that.
    """
    _at_least(0, n_random=n_random)
    _at_least(1, heads=heads)
    row, column = _grid(seqlen, block, device)
    drawn = _draw(row, column, heads, seed, n_random, (column >= n_global) & (column < row - window))
    common = {"block": block, "causal": causal, "device": device}
    fixed = sliding_window(seqlen, window=window, **common) | global_tokens(seqlen, n_global=n_global, last_global=last_global, **common)
    return fixed | _layout(drawn if causal else drawn | drawn.mT, block, causal)


def sparse_transformer_strided(seqlen: int, *, stride: int = 4, heads: int = 1, block: int = 64, causal: bool = True,
                               device: Device = "cpu") -> BlockLayout:
    """The `stride` nearest blocks, and every `stride`-th one (Child et al. 2019, arXiv:1904.10509).

    With several heads the even ones see the near blocks and the odd ones the strided ones; a single head sees both.
    """
    _at_least(1, stride=stride, heads=heads)
    row, column = _grid(seqlen, block, device)
    distance = (row - column).abs()
    return _layout(_by_head([distance < stride, distance % stride == 0], heads), block, causal)


def sparse_transformer_fixed(seqlen: int, *, stride: int = 4, summary: int = 1, n_summaries: int = 1, heads: int = 1, block: int = 64,
                             causal: bool = True, device: Device = "cpu") -> BlockLayout:
    """The own group of `stride` blocks, and `summary` blocks of every group (Child et al. 2019, arXiv:1904.10509).

    Head h sees those that end (h % n_summaries) * summary blocks before the group's end.
    """
    _at_least(1, stride=stride, summary=summary, n_summaries=n_summaries, heads=heads)
    if summary * n_summaries > stride:
        raise ValueError(f"summary, n_summaries: a group of stride={stride} blocks must hold them, got {summary} * {n_summaries}")
    row, column = _grid(seqlen, block, device)
    own = row // stride == column // stride
    before_end = (stride - 1 - column % stride) // summary
    return _layout(torch.stack([own | (before_end == head % n_summaries) for head in range(heads)]), block, causal)


def flat_butterfly(seqlen: int, *, n_factors: int | None = None, n_global: int = 0, block: int = 64, causal: bool = True,
                   device: Device = "cpu") -> BlockLayout:
    """Blocks whose indices differ in at most one of the lowest `n_factors` bits (None: any bit), and `n_global` first rows and columns.

    The flat block butterfly of Pixelated Butterfly (Dao et al. 2022, arXiv:2112.00029), which block-sparse FlashAttention was made for.
    """
    if n_factors is not None:
        _at_least(0, n_factors=n_factors)
    row, column = _grid(seqlen, block, device)
    different = row ^ column
    kept = different & (different - 1) == 0
    if n_factors is not None:
        kept = kept & (different < 1 << n_factors)
    return _layout(kept, block, causal) | global_tokens(seqlen, n_global=n_global, block=block, causal=causal, device=device)


def vertical_slash(seqlen: int, *, vertical: Sequence[int] = (0,), slash: Sequence[int] = (0,), block: int = 64, causal: bool = True,
                   device: Device = "cpu") -> BlockLayout:
    """The columns `vertical`, and the diagonals `slash` blocks below the main one (MInference, Jiang et al. 2024, arXiv:2407.02490)."""
    for name, blocks in (("vertical", vertical), ("slash", slash)):
        if not isinstance(blocks, Sequence) or isinstance(blocks, str):
            raise TypeError(f"{name}: must be a sequence of integers, such as (0,), got {blocks!r}")
        for index in blocks:
            checks.integer(name, index)
    row, column = _grid(seqlen, block, device)
    kept = row + column < 0
    for index in vertical:
        kept = kept | (column == index)
    for offset in slash:
        kept = kept | (row - column == offset)
    return _layout(kept, block, causal)


def streaming(seqlen: int, *, sinks: int = 1, window: int = 2, block: int = 64, causal: bool = True, device: Device = "cpu") -> BlockLayout:
    """The first `sinks` blocks and a sliding window (StreamingLLM, Xiao et al. 2024, arXiv:2309.17453)."""
    _at_least(0, sinks=sinks, window=window)
    row, column = _grid(seqlen, block, device)
    return _layout((column < sinks) | ((row - column).abs() <= window), block, causal)


def random(seqlen: int, *, density: float = 0.1, heads: int = 1, seed: int = 0, block: int = 64, causal: bool = True,
           device: Device = "cpu") -> BlockLayout:
    """The diagonal, and every other block with probability `density`, drawn by seed, head, row and column."""
    checks.number("density", density, "a number in [0, 1]")
    if not 0 <= density <= 1:
        raise ValueError(f"density: must lie in [0, 1], got {density}")
    _at_least(1, heads=heads)
    row, column = _grid(seqlen, block, device)
    return _layout((row == column) | (_scores(row, column, heads, seed) < density * 2**32), block, causal)


def document(seqlen: int, *, cu_seqlens: Tensor, block: int = 64, causal: bool = True) -> BlockLayout:
    """Blocks that share a document, of those that follow each other in one sequence: document n is cu_seqlens[n] .. cu_seqlens[n + 1].

    Blocks at a border see both documents; packed input separates tokens. What lies behind the last document counts as one more.
    """
    checks.tensor("cu_seqlens", cu_seqlens, way_out="; torch.tensor(...) makes one")
    row, _ = _grid(seqlen, block, cu_seqlens.device)
    first_token = row * block
    tokens = torch.cat([first_token, (first_token + block).clamp(max=seqlen) - 1], dim=1)
    first, last = torch.searchsorted(cu_seqlens[1:].long().contiguous(), tokens, right=True).unbind(1)
    return _layout((first[:, None] <= last) & (first <= last[:, None]), block, causal)


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (dense, sliding_window, dilated, global_tokens, longformer, bigbird, sparse_transformer_strided,
                    sparse_transformer_fixed, flat_butterfly, vertical_slash, streaming, random)
}


class Pattern:
    """A pattern's name and options, from which block_sparse_attention makes a layout for the lengths of each call. Layouts that were made
    are kept.

    Pattern("longformer", window=4, block=128) stands for longformer(seqlen, window=4, block=128). Raises ValueError for a name that is not
    in PATTERNS and for options that the pattern does not take.
    """

    def __init__(self, name: str, **options):
        if name not in PATTERNS:
            raise ValueError(f"pattern: must be one of {', '.join(PATTERNS)}, got {name!r}")
        taken = inspect.signature(PATTERNS[name]).parameters
        known = [option for option in taken if option not in ("seqlen", "device")]
        for option in options:
            if option not in known:
                raise ValueError(f"pattern {name}: has no option {option!r}; it takes {', '.join(known)}")
        self.name, self.options = name, options
        self.block = options.get("block", taken["block"].default)
        check_block("block", self.block)
        # a string, because it goes through torch.compile as a constant
        self.key = json.dumps([name, options], sort_keys=True)
        self.heads = self.layout(self.block).heads

    @property
    def prefix_stable(self) -> bool:
        return not self.options.get("last_global", False)

    def layout(self, seqlen: int, device: Device = "cpu") -> BlockLayout:
        """The layout for queries and keys of this length. All lengths with the same number of blocks share it."""
        blocks = -(-seqlen // self.block)
        return kept_layout(self.key, blocks, blocks, torch.device(device))

    def __repr__(self) -> str:
        return f"Pattern({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.options.items())])})"


_cache = LayoutCache(16)


def kept_layout(key: str, q_blocks: int, k_blocks: int, device: torch.device) -> BlockLayout:
    """The last q_blocks rows of a Pattern's layout for k_blocks blocks."""
    wanted = (key, q_blocks, k_blocks, device)
    return _cache.get(wanted, device, lambda: _make_layout(*wanted))


def _make_layout(key: str, q_blocks: int, k_blocks: int, device: torch.device) -> BlockLayout:
    name, options = json.loads(key)
    pattern = PATTERNS[name]
    block = options.get("block", inspect.signature(pattern).parameters["block"].default)
    return pattern(k_blocks * block, device=device, **options)[k_blocks - q_blocks :, :]


def _grid(seqlen: int, block: int, device: Device) -> tuple[Tensor, Tensor]:
    """Row and column of every block, (n, 1) and (n,)."""
    checks.integer("seqlen", seqlen, 0)
    check_block("block", block)
    index = torch.arange(-(-seqlen // block), device=device)
    return index[:, None], index


def _layout(kept: Tensor, block: int, causal: bool) -> BlockLayout:
    checks.flag("causal", causal)
    return BlockLayout.from_mask(kept.tril() if causal else kept, block)


def _at_least(least: int, **options: int) -> None:
    for name, value in options.items():
        checks.integer(name, value, least)


def _by_head(masks: list[Tensor], heads: int) -> Tensor:
    """(heads, n, n): head h takes masks[h % len(masks)]; a single head takes all of them together."""
    if heads == 1:
        return torch.stack(masks).any(0)
    return torch.stack([masks[head % len(masks)] for head in range(heads)])


def _scores(row: Tensor, column: Tensor, heads: int, seed: int) -> Tensor:
    """Uniform random numbers below 2**32 for (heads, n, n), each a function of its place and the seed."""
    checks.integer("seed", seed)
    head = torch.arange(heads, device=row.device).view(-1, 1, 1)
    counter = [x + torch.zeros_like(head + row + column) for x in (column, row, head, 0)]
    return philox(torch.full((), seed, device=row.device), counter)[0]


def _draw(row: Tensor, column: Tensor, heads: int, seed: int, count: int, eligible: Tensor) -> Tensor:
    """bool (heads, n, n): of each row's eligible columns `count`, those with the smallest numbers."""
    count = min(count, column.numel())
    if count == 0:
        return (row + column < 0).expand(heads, -1, -1)
    # adding the column makes all numbers different
    number = (_scores(row, column, heads, seed) << 24 | column).masked_fill(~eligible, torch.iinfo(torch.int64).max)
    return eligible & (number <= number.sort(dim=-1).values[..., count - 1 : count])
