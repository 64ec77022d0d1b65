"""The kernel of slabs.py in Gluon for Hopper: rows are gathered into shared memory by asynchronous copies, one step ahead."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from attnzoo_kernels._gluon.hopper import barrier, fence_async_shared, product_layout, warpgroup_mma, warpgroup_mma_wait
from attnzoo_kernels._triton.softmax import LN2, LOG2E
from attnzoo_kernels.routed.slabs import ITEM

NUMBERS = ["total_q", "slabs", "units", "capacity", "pairs", "RING"]


@gluon.constexpr_function
def row_layout(WIDTH):
    """Rows of 16-bit numbers, 16 bytes a thread."""
    threads = min(WIDTH // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def _load_block(smem, ptr, strides, key, keys, head, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    layout: gl.constexpr = row_layout(WIDTH)
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    source = ptr + gl.cast(key, gl.int64) * strides[0] + gl.cast(head, gl.int64) * strides[1]
    async_copy.async_copy_global_to_shared(smem, source + (row * strides[0])[:, None] + column[None, :], mask=(row < keys)[:, None])


@gluon.jit
def _sources(pair_ptr, first, at, rows, strides, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Where in a slab's queries the rows at .. at + BLOCK_M of an item lie."""
    row = at + gl.arange(0, BLOCK_M, gl.SliceLayout(1, row_layout(WIDTH)))
    inside = row < rows
    place = (first + row).to(gl.uint32)
    chooser = gl.load(pair_ptr + place // ROWS, mask=inside, other=0).to(gl.uint32)
    token, head = (chooser // GROUP).to(gl.int32), (chooser % GROUP * ROWS + place % ROWS).to(gl.int32)
    return token * strides[0] + head * strides[1]


@gluon.jit
def _gather(smem, q_ptr, source, at, rows, WIDTH: gl.constexpr):
    layout: gl.constexpr = row_layout(WIDTH)
    row = at + gl.arange(0, smem.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(smem, q_ptr + source[:, None] + column[None, :], mask=(row < rows)[:, None])
    async_copy.commit_group()


@gluon.jit
def _walk(q_tiles, k_tile, v_tile, q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, pair_ptr, item_ptr, part_ptr, part_lse_ptr,
          merged_ptr, unit, slabs, softmax_scale, merges, SLAB: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
          DV: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, RING: gl.constexpr, PHASE: gl.constexpr):
    key, keys, first, rows = gl.load(item_ptr), gl.load(item_ptr + 1), gl.load(item_ptr + 2), gl.load(item_ptr + 3)
    seen_by_first, before = gl.load(item_ptr + 4), gl.load(item_ptr + 5)
    key_head = unit // slabs
    q_ptr += gl.cast(unit % slabs * SLAB, gl.int64) * q_strides[0] + gl.cast(key_head * (GROUP * ROWS), gl.int64) * q_strides[1]
    barrier()  # the tiles of the item before have been read
    _load_block(k_tile, k_ptr, k_strides, key, keys, key_head, BLOCK_N, D)
    source = _sources(pair_ptr, first, 0, rows, q_strides, BLOCK_M, D, ROWS, GROUP)
    _gather(q_tiles.index(0), q_ptr, source, 0, rows, D)
    _load_block(v_tile, v_ptr, v_strides, key, keys, key_head, BLOCK_N, DV)
    async_copy.commit_group()
    source = _sources(pair_ptr, first, BLOCK_M, rows, q_strides, BLOCK_M, D, ROWS, GROUP)
    if PHASE == 0:
        if unit >= RING:
            while gl.load(merged_ptr + unit - RING, volatile=True) < merges:
                pass
    part_ptr += first * DV
    part_lse_ptr += first
    scores_layout: gl.constexpr = product_layout(BLOCK_N)
    out_layout: gl.constexpr = product_layout(DV)
    store_layout: gl.constexpr = row_layout(DV)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
    stage = 0
    for at in range(0, rows, BLOCK_M):
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        q_tile = q_tiles.index(stage)
        stage ^= 1
        if at + BLOCK_M < rows:
            _gather(q_tiles.index(stage), q_ptr, source, at + BLOCK_M, rows, D)
            source = _sources(pair_ptr, first, at + 2 * BLOCK_M, rows, q_strides, BLOCK_M, D, ROWS, GROUP)
        # [BLOCK_M, BLOCK_N]
        scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        row = at + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores_layout))
        seen = gl.minimum(keys, seen_by_first + ((before + row).to(gl.uint32) // (ROWS * GROUP)).to(gl.int32))
        scores = gl.where(column[None, :] < seen[:, None], scores, -float("inf"))
        row_max = gl.max(scores, 1) * (softmax_scale * LOG2E)
        base = gl.where(row_max == -float("inf"), 0.0, row_max)
        weights = gl.exp2(scores * (softmax_scale * LOG2E) - base[:, None])
        row_sum = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(v_tile.dtype), gl.DotOperandLayout(0, out_layout, 2))
        # [BLOCK_M, DV]
        out = gl.zeros([BLOCK_M, DV], gl.float32, out_layout)
        out = warpgroup_mma(p, v_tile, out, use_acc=False, is_async=True)
        out = warpgroup_mma_wait(0, deps=[out])
        gl.store(part_lse_ptr + row, row_max + gl.log2(row_sum), mask=row < rows)
        out *= gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, out_layout))[:, None]
        # through the queries' place, which only this product read
        out_tile = q_tile._reinterpret(q_tile.dtype, [BLOCK_M, DV], v_tile.layout)
        out_tile.store(out.to(q_tile.dtype))
        barrier()
        row = at + gl.arange(0, BLOCK_M, gl.SliceLayout(1, store_layout))
        columns = gl.arange(0, DV, gl.SliceLayout(0, store_layout))
        gl.store(part_ptr + (row * DV)[:, None] + columns[None, :], out_tile.load(store_layout), mask=(row < rows)[:, None])


@gluon.jit
def _row_of_slab(row, unit, slabs, total_q, SLAB: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """Token and head of rows of a slab, which count the heads of all its tokens, and which of them there are."""
    token = (row // (ROWS * GROUP)).to(gl.int32) + unit % slabs * SLAB
    head = (row % (ROWS * GROUP)).to(gl.int32) + unit // slabs * (ROWS * GROUP)
    return token, head, (row < SLAB * GROUP * ROWS) & (token < total_q)


@gluon.jit
def _part_rows(place_ptr, row, inside, begin: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, AT_ONCE: gl.constexpr):
    """The part rows of AT_ONCE slots of rows, negative where there is none."""
    at = place_ptr + row // ROWS * (SLOTS + 1)
    rest = (row % ROWS).to(gl.int32)
    parts = ()
    for n in gl.static_range(AT_ONCE):
        parts += (gl.load(at + begin + n, mask=inside & (begin + n <= SLOTS), other=-1) * ROWS + rest,)
    return parts


@gluon.jit
def _merge(place_ptr, part_ptr, part_lse_ptr, out_ptr, lse_ptr, stats_ptr, walked_ptr, walks, unit, slabs, first, total_q,
           HEADS: gl.constexpr, SLAB: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, DV: gl.constexpr,
           MERGE_ROWS: gl.constexpr, SLOTS_AT_ONCE: gl.constexpr, PHASE: gl.constexpr):
    """Output, LSE and statistics of MERGE_ROWS rows of a slab, of which each thread reads 16 bytes of a row of each slot. The next part
    rows are loaded while parts are."""
    layout: gl.constexpr = row_layout(DV)
    AT_ONCE: gl.constexpr = layout.threads_per_warp[0] * 4
    column = gl.arange(0, DV, gl.SliceLayout(0, layout))
    lane = gl.arange(0, AT_ONCE, gl.SliceLayout(1, layout))
    row = (first + lane).to(gl.uint32)
    token, head, inside = _row_of_slab(row, unit, slabs, total_q, SLAB, ROWS, GROUP)
    part_row = _part_rows(place_ptr, row, inside, 0, ROWS, SLOTS, SLOTS_AT_ONCE)
    if PHASE == 0:
        while gl.atomic_add(walked_ptr + unit, 0, sem="acquire") < walks:
            pass
    for at in range(0, MERGE_ROWS, AT_ONCE):
        row = (first + at + lane).to(gl.uint32)
        token, head, inside = _row_of_slab(row, unit, slabs, total_q, SLAB, ROWS, GROUP)
        base = gl.full([AT_ONCE], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros([AT_ONCE], gl.float32, gl.SliceLayout(1, layout))
        acc = gl.zeros([AT_ONCE, DV], gl.float32, layout)
        for begin in gl.static_range(0, SLOTS + 1, SLOTS_AT_ONCE):
            parts, lses = (), ()
            for n in gl.static_range(SLOTS_AT_ONCE):
                there = part_row[n] >= 0
                lses += (gl.load(part_lse_ptr + part_row[n], mask=there, other=-float("inf"), cache_modifier=".cg"),)
                parts += (gl.load(part_ptr + (part_row[n] * DV)[:, None] + column[None, :], mask=there[:, None], other=0.0,
                                  cache_modifier=".cg"),)
            if begin + SLOTS_AT_ONCE <= SLOTS:
                part_row = _part_rows(place_ptr, row, inside, begin + SLOTS_AT_ONCE, ROWS, SLOTS, SLOTS_AT_ONCE)
            else:
                _, _, next_inside = _row_of_slab(row + AT_ONCE, unit, slabs, total_q, SLAB, ROWS, GROUP)
                part_row = _part_rows(place_ptr, row + AT_ONCE, next_inside & (at + AT_ONCE < MERGE_ROWS), 0, ROWS, SLOTS, SLOTS_AT_ONCE)
            top = base
            for n in gl.static_range(SLOTS_AT_ONCE):
                top = gl.maximum(top, lses[n])
            finite = gl.where(top == -float("inf"), 0.0, top)
            rescale = gl.exp2(base - finite)
            base = top
            total *= rescale
            acc *= rescale[:, None]
            for n in gl.static_range(SLOTS_AT_ONCE):
                weight = gl.exp2(lses[n] - finite)
                total += weight
                acc += weight[:, None] * parts[n].to(gl.float32)
        empty = base == -float("inf")
        total = gl.where(empty, 1.0, total)
        out_row = out_ptr + (token.to(gl.int64) * HEADS + head) * DV
        gl.store(out_row[:, None] + column[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside[:, None])
        lse_at = head.to(gl.int64) * total_q + token
        sum_log2 = gl.log2(total)
        gl.store(lse_ptr + lse_at, gl.where(empty, -float("inf"), (base + sum_log2) * LN2), mask=inside)
        gl.store(stats_ptr + lse_at, gl.where(empty, float("inf"), base), mask=inside)
        gl.store(stats_ptr + total_q.to(gl.int64) * HEADS + lse_at, sum_log2, mask=inside)


@gluon.jit
def _work_of(items_ptr, group, units, merges, LAG: gl.constexpr, PHASE: gl.constexpr):
    """How many items of a group merge rows, and how many there are."""
    walks = gl.load(items_ptr + group, mask=group < units, other=0)
    if PHASE == 2:
        walks = gl.where(group > units, walks, 0)  # a plain zero is folded into a branch that the compiler does not take
    merging = gl.where((group >= LAG) & (group - LAG < units), merges, 0)
    if PHASE == 1:
        merging = gl.where(group > 2 * units + LAG, merging, 0)
    return merging, walks + merging


@gluon.jit
def _signal(ptr):
    barrier()
    gl.atomic_add(ptr, 1, sem="release")


@gluon.jit(do_not_specialize=NUMBERS)
def routed_slab_hopper_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stats_ptr, pair_ptr, place_ptr, item_ptr, items_ptr, ticket_ptr,
                              walked_ptr, merged_ptr, part_ptr, part_lse_ptr, q_strides, k_strides, v_strides, softmax_scale, total_q,
                              slabs, units, capacity, pairs, RING, SLAB: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
                              ROWS: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
                              BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, MERGE_ROWS: gl.constexpr, SLOTS_AT_ONCE: gl.constexpr,
                              LAG: gl.constexpr, PHASE: gl.constexpr):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_M, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype))
    k_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype))
    v_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, VALUE_DIM], gl.NVMMASharedLayout.get_default_for([BLOCK_N, VALUE_DIM], dtype))
    merges = gl.cdiv(SLAB * GROUP * ROWS, MERGE_ROWS)
    ticket = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
    group, start = 0, 0
    merging, work = _work_of(items_ptr, 0, units, merges, LAG, PHASE)
    while group < units + LAG:
        if ticket >= start + work:
            start += work
            group += 1
            merging, work = _work_of(items_ptr, group, units, merges, LAG, PHASE)
        else:
            index = ticket - start
            ticket = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
            # of `work` items, `merging` ones are spread evenly
            merged_before = index * merging // work
            merges_rows = (index + 1) * merging // work > merged_before
            unit = gl.where(merges_rows, group - LAG, group)
            place = gl.cast(unit, gl.int64) * pairs
            part_row = gl.cast(unit % RING, gl.int64) * pairs * ROWS
            if merges_rows:
                _merge(place_ptr + place, part_ptr + part_row * VALUE_DIM, part_lse_ptr + part_row, out_ptr, lse_ptr, stats_ptr, walked_ptr,
                       gl.load(items_ptr + unit), unit, slabs, merged_before * MERGE_ROWS, total_q, HEADS, SLAB, SLOTS, ROWS, GROUP,
                       VALUE_DIM, MERGE_ROWS, SLOTS_AT_ONCE, PHASE)
                if PHASE == 0:
                    _signal(merged_ptr + unit)
            else:
                item = item_ptr + (gl.cast(unit, gl.int64) * capacity + index - merged_before) * ITEM
                _walk(q_tiles, k_tile, v_tile, q_ptr, k_ptr, v_ptr, q_strides, k_strides, v_strides, pair_ptr + place, item,
                      part_ptr + part_row * VALUE_DIM, part_lse_ptr + part_row, merged_ptr, unit, slabs, softmax_scale, merges, SLAB, ROWS,
                      GROUP, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_M, RING, PHASE)
                if PHASE == 0:
                    _signal(walked_ptr + unit)
