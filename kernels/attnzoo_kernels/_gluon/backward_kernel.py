"""The Gluon kernel of a Hopper backward in which two consumers make all of dQ, dK and dV, for a softmax and, by hooks, for other variants.

A kernel is persistent: a program stays on its multiprocessor and takes tiles of 128 keys from a counter. One producer warp loads. Each
consumer holds dK and dV of 64 keys in registers and goes over the queries of all heads of a group. It also makes half of dQ = dS K from
both consumers' dS: half of the columns in steps of 64 queries, half of the rows in steps of 128. TMA adds the halves to a float32 dQ in
global memory. The consumers start these additions, or a warp of its own does. Where the sums have a fixed order, that warp waits for its
turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import (
    Gradients,
    all_queries,
    consume,
    pair_mainloop,
    pair_start,
    pair_store,
    same_tile,
    scale_of_head,
)
from attnzoo_kernels._gluon.backward_dq import add_dq, add_heads, first_buffer
from attnzoo_kernels._gluon.backward_load import Operands, Source, all_steps, load, load_keys, load_queries, next_step
from attnzoo_kernels._gluon.backward_step import pair_barriers, pair_step, pair_tiles, softmax_gradient, softmax_weights
from attnzoo_kernels._gluon.backward_tiles import Problem, next_key_tile
from attnzoo_kernels._gluon.hopper import constants, invalidate


@constants
class Config:
    """What a kernel of the backward is compiled for: constants, switches and hooks.

    The comment at a hook gives its arguments and its result. config is this Config, ME the consumer's number, own the variant's own struct;
    `backward_consume` explains the other names. A hook that "may be left out" is None by default.
    """

    HEAD_DIM: gl.constexpr
    VALUE_DIM: gl.constexpr
    WIDTH: gl.constexpr  # columns of tiles of queries and keys
    VALUE_WIDTH: gl.constexpr  # columns of tiles of values
    ROWS: gl.constexpr  # queries of a step
    DQ_ROWS: gl.constexpr  # rows of dQ that a step makes
    STAGES: gl.constexpr  # steps whose queries have room in shared memory
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    ORDERED: gl.constexpr  # dQ is added up in a fixed order, by semaphores
    DQ_CLEARED: gl.constexpr  # dQ was set to zero before the launch, although ORDERED
    DQ_WARP: gl.constexpr  # a warp of its own adds dQ to memory
    DQ_LAGS: gl.constexpr  # dQ is made one step late, so that a consumer need not wait for the other's dS of the same step
    LISTED: gl.constexpr  # the steps of a tile are a list of query tiles, in which those that need no mask come first
    OPTIONS: gl.constexpr  # a variant's own constants
    NEEDS_NUMBER: gl.constexpr  # STORE_GRADS needs the number of the tile; may be left out
    TILE_PARAMS: gl.constexpr  # (own, key, len_q, len_k, config) -> the variant's parameters for a tile of keys, which the hooks below get;
    # may be left out: they get `own`
    NEXT_TILE: gl.constexpr = next_key_tile  # (problem, own, config): takes the next tile of keys from the counter
    BOUNDS: gl.constexpr = all_queries  # (tile_params, smem, slot, member, bounds) -> the segments of a query head's steps
    LOADED_STEPS: gl.constexpr = all_steps  # (tile_params, tile, member) -> (first step, end, state): the steps that are
    # loaded for a query head
    NEXT_QUERIES: gl.constexpr = next_step  # (tile_params, state, n) -> (tile of queries, state): which one the next step loads
    QUERY_TILE: gl.constexpr = same_tile  # (tile_params, bars, step, n, config) -> the tile of queries that a consumer's step works on
    LOAD_Q: gl.constexpr = load_queries  # (operands, stats_desc, smem, bars, tile_params, stage, batch, head, row, j, stats_tile, IN_TAIL,
    # config): loads what a step needs
    LOAD_K: gl.constexpr = load_keys  # (operands, smem, bars, batch, kv_head, key): loads a tile of keys and values
    INIT_GRADS: gl.constexpr = pair_start  # (own, smem, slot, config) -> a consumer's sums of dK and dV, zeros, before a tile of keys
    MAINLOOP: gl.constexpr = pair_mainloop  # (state, at, bounds, low, high, tile_params, slot, smem, bars, dq_desc, problem, scale, config,
    # ME) -> (state, next step): the steps of a tile
    STEP: gl.constexpr = pair_step  # (sums, smem, bars, dq_desc, dq_tile, step, some, head_params, low, high, config, ME, MASKED) -> sums:
    # what a consumer does with a step. The hooks up to STORE_SUMS are those of pair_mainloop and pair_step
    HEAD_PARAMS: gl.constexpr = scale_of_head  # (scale, tile_params, smem, slot, member, dq_tile, problem, config, ME) -> the variant's
    # parameters for a query head: `head_params` of the hooks of its steps
    STEP_PARAMS: gl.constexpr  # (tile of dQ, head_params, config) -> the variant's parameters for a step: what WEIGHTS and END_SUMS need
    # from global memory, loaded before the products; may be left out; not with DQ_LAGS
    WEIGHTS: gl.constexpr = softmax_weights  # (scores, step_params, smem, stage, head_params, low, high, config, MASKED) -> a step's
    # weights
    GRADIENT: gl.constexpr = softmax_gradient  # (weights, their gradients, smem, stage, config) -> the gradients of the scores
    INIT_SUMS: gl.constexpr  # () -> the variant's sums of dS, zeros, before a query head's steps; may be left out; not with DQ_LAGS
    STORE_DS: gl.constexpr  # (dS, smem, config, ME): stores what else the products of START_SUMS read; may be left out
    START_SUMS: gl.constexpr  # (sums, dS in shared memory, head_params, smem, config, ME) -> a tuple of products in flight, of this
    # consumer's dS
    END_SUMS: gl.constexpr  # (the products, step_params, head_params, tile of dQ, config) -> the sums, while the product for dK runs
    STORE_SUMS: gl.constexpr  # (sums, head_params, bounds, config, ME): after a query head's steps
    STORE_GRADS: gl.constexpr = pair_store  # (grads, own, buffer, state, dk_scale, batch, kv_head, first_k, row, len_k, number, config,
    # ME): stores the sums
    DQ_STEPS: gl.constexpr = add_heads  # (dq_desc, dq_semaphore, smem, bars, first, step, seen, tile_params, problem, config) -> next step:
    # what the warp of DQ_WARP does for one tile of keys
    DQ_BUFFER: gl.constexpr = first_buffer  # (tile_params, j, config) -> which buffer of dQ a step adds to


@gluon.jit(do_not_specialize=["own_1", "own_2", "own_3", "own_4", "window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k",
                              "kv_heads", "head_group", "head_tiles", "n_tiles"],
           do_not_specialize_on_alignment=["own_a", "own_b", "own_c", "own_d", "own_e", "cu_seqlens_q", "cu_seqlens_k", "dq_semaphore"])
def pair_bwd_kernel(own_a, own_b, own_c, own_d, own_e, q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc,
                    v_tail_desc, do_tail_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, dq_desc, dv_from, dv_to, counter, dq_semaphore,
                    cu_seqlens_q, cu_seqlens_k, own_1, own_2, own_3, own_4, softmax_scale, scale, window_left, window_right, n_seqs,
                    seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv, group, head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr,
                    VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                    ORDERED: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, DQ_WARP: gl.constexpr, DQ_LAGS: gl.constexpr,
                    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LISTED: gl.constexpr = False, OPTIONS: gl.constexpr = None,
                    NEEDS_NUMBER: gl.constexpr = None, OWN: gl.constexpr = None, COLUMNS: gl.constexpr = None,
                    TILE_PARAMS: gl.constexpr = None, NEXT_TILE: gl.constexpr = next_key_tile,
                    BOUNDS: gl.constexpr = all_queries, LOADED_STEPS: gl.constexpr = all_steps,
                    NEXT_QUERIES: gl.constexpr = next_step, QUERY_TILE: gl.constexpr = same_tile, LOAD_Q: gl.constexpr = load_queries,
                    INIT_GRADS: gl.constexpr = pair_start, MAINLOOP: gl.constexpr = pair_mainloop,
                    HEAD_PARAMS: gl.constexpr = scale_of_head, STEP_PARAMS: gl.constexpr = None, WEIGHTS: gl.constexpr = softmax_weights,
                    GRADIENT: gl.constexpr = softmax_gradient, INIT_SUMS: gl.constexpr = None, STORE_DS: gl.constexpr = None,
                    START_SUMS: gl.constexpr = None, END_SUMS: gl.constexpr = None, STORE_SUMS: gl.constexpr = None,
                    STORE_GRADS: gl.constexpr = pair_store, DQ_STEPS: gl.constexpr = add_heads):
    """dv_from and dv_to are those of `Gradients`, for launches that add up dV, or None. stats_desc is None where rows have no statistics.

    OWN turns the arguments that begin with own_ into `own`, which the variant's other hooks get. COLUMNS gives, from `own`, the shared
    memory for pair_tiles' columns, if `own` has it already.
    """
    problem = Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                      window_left, window_right)
    config = Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=WIDTH, VALUE_WIDTH=WIDTH, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES,
                    PACKED=PACKED, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, ORDERED=ORDERED, DQ_WARP=DQ_WARP, DQ_LAGS=DQ_LAGS, LISTED=LISTED,
                    OPTIONS=OPTIONS, NEEDS_NUMBER=NEEDS_NUMBER, TILE_PARAMS=TILE_PARAMS, NEXT_TILE=NEXT_TILE, BOUNDS=BOUNDS,
                    LOADED_STEPS=LOADED_STEPS, NEXT_QUERIES=NEXT_QUERIES, QUERY_TILE=QUERY_TILE, LOAD_Q=LOAD_Q, INIT_GRADS=INIT_GRADS,
                    MAINLOOP=MAINLOOP, HEAD_PARAMS=HEAD_PARAMS, STEP_PARAMS=STEP_PARAMS, WEIGHTS=WEIGHTS, GRADIENT=GRADIENT,
                    INIT_SUMS=INIT_SUMS, STORE_DS=STORE_DS, START_SUMS=START_SUMS, END_SUMS=END_SUMS, STORE_SUMS=STORE_SUMS,
                    STORE_GRADS=STORE_GRADS, DQ_STEPS=DQ_STEPS)
    own = ()
    if COLUMNS is None:
        smem = pair_tiles(q_desc.dtype, config)
        bars = pair_barriers(config)
        if OWN is not None:
            own = OWN((own_a, own_b, own_c, own_d, own_e), (own_1, own_2, own_3, own_4), problem, q_desc.dtype, config)
    else:
        own = OWN((own_a, own_b, own_c, own_d, own_e), (own_1, own_2, own_3, own_4), problem, q_desc.dtype, config)
        smem = pair_tiles(q_desc.dtype, config, COLUMNS(own))
        bars = pair_barriers(config)
    run_pair(Source(Operands(q_desc, k_desc, v_desc, do_desc), Operands(q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc), stats_desc),
             Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, HEAD_DIM, VALUE_DIM, dv_from, dv_to), smem, bars, dq_desc,
             dq_semaphore, problem, own, scale, softmax_scale, REGISTERS, LOAD_REGISTERS, config)


@gluon.jit
def run_pair_tiles(source, into, dq_desc, dq_semaphore, call, own, scale, dk_scale, REGISTERS: gl.constexpr,
                   LOAD_REGISTERS: gl.constexpr, config, columns=None):
    """run_pair with the shared memory and barriers that pair_step needs. columns: as in pair_tiles."""
    smem = pair_tiles(source.tensors.q.dtype, config, columns)
    run_pair(source, into, smem, pair_barriers(config), dq_desc, dq_semaphore, call, own, scale, dk_scale, REGISTERS, LOAD_REGISTERS,
             config)


@gluon.jit
def run_pair(source, into, smem, bars, dq_desc, dq_semaphore, call, own, scale, dk_scale, REGISTERS: gl.constexpr,
             LOAD_REGISTERS: gl.constexpr, config):
    """Starts the warps of a backward by two consumers. into: Gradients. call: Problem. own: the variant's own struct."""
    # an assignment turns constants in the tuples into ordinary numbers; for constants Triton 3.6 would compile other code
    grads = into
    problem = call
    if config.DQ_WARP:
        gl.warp_specialize([
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, config, 0)),
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, config, 1)),
            (load, (source, smem, bars, problem, own, config)),
            (add_dq, (dq_desc, dq_semaphore, smem, bars, problem, own, config)),
        ], [4, 1, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, config, 0)),
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, config, 1)),
            (load, (source, smem, bars, problem, own, config)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])
    invalidate(bars)
