"""What the warps of a Hopper forward share: structs, tiles in shared memory, barriers."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import barriers, ring

ROWS = gl.constexpr(64)  # queries of a consumer, a warp group: what one matrix instruction takes
WORK = gl.constexpr(2)  # how many tiles of queries the producer warp may be ahead of the consumers


class Descriptors(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    residual: Any = None  # like `out`, for the output's rounding error, which finish_with_residual stores


class Problem(NamedTuple):
    counter: Any  # of tiles, in global memory: see tile_scheduler.next_index
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    n_seqs: Any
    seqlen_q: Any  # where packed, the total
    seqlen_k: Any
    heads: Any
    group: Any  # query heads of a key head
    head_group: Any  # heads whose tiles are interleaved, so that their keys stay in L2
    n_tiles: Any
    window_left: Any
    window_right: Any


class Rows(NamedTuple):
    """The scale of the scores, and where the LSE and the statistics of rows are stored."""

    scale: Any  # softmax_scale * log2(e): it brings products to base 2
    lse: Any
    stats: Any  # [2, rows]: row_max in base 2 and log2 of row_sum
    stride_stats: Any


class Tiles(NamedTuple):
    """Tiles in shared memory. With PARTS, each tile of queries or keys is PARTS tiles that hold a part of the columns each."""

    q: Any  # [Q_SLOTS * CONSUMERS, 64, BLOCK_D]; with PARTS, PARTS times as many
    out: Any  # [OUT_SLOTS * CONSUMERS, 64, BLOCK_DV, or a part of it]
    k: Any  # [STAGES, BLOCK_N, BLOCK_D]; with PARTS, PARTS times as many
    v: Any  # [STAGES, BLOCK_N, BLOCK_DV]
    work: Any  # int32 words by which the producer warp describes the next tiles to the consumers


class Barriers(NamedTuple):
    """Rings of mbarriers. `full`: the producer warp's data has arrived. `empty`: the consumers have read it."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    work_full: Any
    work_empty: Any


class Program(NamedTuple):
    """All that the warps of a program share; each hook gets it."""

    descs: Descriptors
    problem: Problem
    rows: Rows
    tiles: Tiles
    bars: Barriers
    own: Any  # the variant's own struct, which only its hooks read


@gluon.jit
def tiles_like(desc, COUNT: gl.constexpr):
    """COUNT shared tiles of a descriptor's box."""
    SHAPE: gl.constexpr = desc.block_type.shape
    TILE: gl.constexpr = [SHAPE[len(SHAPE) - 2], SHAPE[len(SHAPE) - 1]]
    return gl.allocate_shared_memory(desc.dtype, [COUNT, TILE[0], TILE[1]], gl.NVMMASharedLayout.get_default_for(TILE, desc.dtype))


@gluon.constexpr_function
def words_of(config):
    """How many int32 describe a tile to the consumers."""
    return 3 if config.TILE_WORDS.value is None else config.TILE_WORDS.value


@gluon.jit
def work_and_barriers(config):
    """Shared memory for the words of each coming tile, which the consumers read, and the Barriers."""
    work = gl.allocate_shared_memory(gl.int32, [words_of(config) * WORK, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    PLACES: gl.constexpr = config.Q_SLOTS * config.CONSUMERS
    bars = Barriers(barriers(PLACES, 1), barriers(PLACES, 1), barriers(config.STAGES, 1 if config.LOAD_BIAS is None else 2),
                    barriers(config.STAGES, config.CONSUMERS), barriers(config.STAGES, 1), barriers(config.STAGES, config.CONSUMERS),
                    barriers(WORK, 1), barriers(WORK, config.CONSUMERS))
    return work, bars


@gluon.jit
def allocate(descs, config):
    """(Tiles, Barriers)."""
    PARTS: gl.constexpr = 1 if config.PARTS is None else config.PARTS
    q = tiles_like(descs.q, config.Q_SLOTS * config.CONSUMERS * PARTS)
    OUT_SLOTS: gl.constexpr = 1 if config.OUT_SLOTS is None else config.OUT_SLOTS
    out = tiles_like(descs.out, OUT_SLOTS * config.CONSUMERS)
    k = tiles_like(descs.k, config.STAGES * PARTS)
    v = tiles_like(descs.v, config.STAGES)
    work, bars = work_and_barriers(config)
    return Tiles(q, out, k, v, work), bars


@gluon.jit
def place_of_queries(q_step, CONSUMER: gl.constexpr, config):
    """For the q_step-th load of queries: (index of a consumer's queries in shared memory, phase of their barriers)."""
    slot, phase = ring(q_step, config.Q_SLOTS)
    return slot * config.CONSUMERS + CONSUMER, phase
