"""How a persistent program gets its tiles: the loading warp takes them from a counter and tells the warp groups that compute."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.hopper import mbarrier, ring
from attnzoo_kernels._gluon.tiles import decode_tile, key_tiles, sequence_bounds

WORK = gl.constexpr(2)  # tiles that the loading warp may be ahead


@gluon.jit
def loaded_tiles(row, ROWS: gl.constexpr, len_q, len_k, window_left, window_right, BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr,
                 HAS_RIGHT: gl.constexpr):
    """Tiles of keys that a program loads for its rows, at least one: (begin, end)."""
    begin, _, _, end = key_tiles(row, ROWS, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    return begin, gl.maximum(end, begin + 1)


@gluon.jit
def consumer_tiles(row, ME, ROWS: gl.constexpr, CONSUMERS: gl.constexpr, len_q, len_k, window_left, window_right,
                   BLOCK_N: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """First row and tiles of keys, at least one, of one of the program's consumers: (my_row, loaded_begin, loaded_end, begin, full_begin,
    full_end, end). It walks end - 1 down to begin, and those loaded on either side are for others."""
    loaded_begin, loaded_end = loaded_tiles(row, CONSUMERS * ROWS, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    my_row = row + ME * ROWS
    begin, full_begin, full_end, end = key_tiles(my_row, ROWS, len_q, len_k, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    begin = gl.where(my_row < len_q, gl.minimum(begin, loaded_end - 1), loaded_end - 1)
    end = gl.where(my_row < len_q, gl.maximum(end, begin + 1), loaded_end)
    return my_row, loaded_begin, loaded_end, begin, full_begin, full_end, end


@gluon.jit
def forward_barriers(Q_PLACES: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Where the next tile is written, and the barriers (q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty)."""
    work = gl.allocate_shared_memory(gl.int32, [3 * WORK, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_PLACES, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    work_full = gl.allocate_shared_memory(gl.int64, [WORK, 1], mbarrier.MBarrierLayout())
    work_empty = gl.allocate_shared_memory(gl.int64, [WORK, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(Q_PLACES):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(k_full.index(n), count=1)
        mbarrier.init(v_full.index(n), count=1)
        mbarrier.init(k_empty.index(n), count=CONSUMERS)
        mbarrier.init(v_empty.index(n), count=CONSUMERS)
    for n in gl.static_range(WORK):
        mbarrier.init(work_full.index(n), count=1)
        mbarrier.init(work_empty.index(n), count=CONSUMERS)
    return work, (q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty)


@gluon.jit
def next_tile(index, counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, head_group, n_tiles, BLOCK_M: gl.constexpr,
              PACKED: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """The first tile from the index-th on that has rows: (index, sequence, head, row, first_q, len_q, first_k, len_k)."""
    sequence, head, tile = decode_tile(index, cu_seqlens_q, n_seqs, seqlen_q, heads, head_group, BLOCK_M, PACKED, HAS_RIGHT)
    first_q, len_q = sequence_bounds(cu_seqlens_q, sequence, n_seqs, seqlen_q, PACKED, True)
    row = tile * BLOCK_M
    if PACKED:
        while (row >= len_q) & (index < n_tiles):
            index = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
            sequence, head, tile = decode_tile(index, cu_seqlens_q, n_seqs, seqlen_q, heads, head_group, BLOCK_M, PACKED, HAS_RIGHT)
            first_q, len_q = sequence_bounds(cu_seqlens_q, sequence, n_seqs, seqlen_q, PACKED, True)
            row = tile * BLOCK_M
        if HAS_RIGHT:  # the last tile of a sequence first: it walks most keys
            row = ((len_q + BLOCK_M - 1) // BLOCK_M - 1 - tile) * BLOCK_M
    first_k, len_k = sequence_bounds(cu_seqlens_k, sequence, n_seqs, seqlen_k, PACKED, False)
    return index, sequence, head, row, first_q, len_q, first_k, len_k


@gluon.jit
def leave_at_zero(counter, index, n_tiles):
    """Behind a program's last tile, for the next kernel: each program asks once in vain, and the last one to do so gets the highest
    `index`."""
    if index == n_tiles + gl.num_programs(0) - 1:
        gl.store(counter, 0)


@gluon.jit
def publish(work, work_full, work_empty, taken, sequence, head, row):
    """Tell the consumers of the next tile; a sequence of -1 ends. They get what they would else have to divide for."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot, phase = ring(taken, WORK)
    mbarrier.wait(work_empty.index(slot), phase ^ 1)
    work.index(slot).store(gl.full([1], sequence, gl.int32, lane))
    work.index(WORK + slot).store(gl.full([1], head, gl.int32, lane))
    work.index(2 * WORK + slot).store(gl.full([1], row, gl.int32, lane))
    mbarrier.arrive(work_full.index(slot), count=1)


@gluon.jit
def take(work, work_full, work_empty, taken):
    """The next tile, once the producer names it: (sequence or -1, head, row)."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot, phase = ring(taken, WORK)
    mbarrier.wait(work_full.index(slot), phase)
    sequence = gl.max(work.index(slot).load(lane), 0)
    head = gl.max(work.index(WORK + slot).load(lane), 0)
    row = gl.max(work.index(2 * WORK + slot).load(lane), 0)
    mbarrier.arrive(work_empty.index(slot), count=1)
    return sequence, head, row
