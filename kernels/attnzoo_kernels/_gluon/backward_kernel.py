"""The Gluon kernel of a softmax's Hopper backward, where two consumers make all of dQ, dK and dV between them.

A program stays on its multiprocessor and takes tiles of 128 keys from a counter. One warp loads; each consumer holds dK and dV of 64 keys
in registers, walks the queries, of all heads of a group, and makes half of dQ = dS K from both consumers' dS: half of the columns in
steps of 64 queries, half of the rows in steps of 128. TMA adds the halves to memory, told to by the consumers, or by another warp, which
waits for its turn where the sums are to come in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.backward_consume import Gradients, all_queries, consume, pair_mainloop, pair_start, pair_store, same_tile
from attnzoo_kernels._gluon.backward_dq import add_dq, first_buffer
from attnzoo_kernels._gluon.backward_load import Operands, Source, all_steps, load, load_keys, load_queries, next_step
from attnzoo_kernels._gluon.backward_step import pair_barriers, pair_step, pair_tiles
from attnzoo_kernels._gluon.backward_tiles import Config, Problem, next_key_tile, same_for_all
from attnzoo_kernels._gluon.hopper import invalidate


@gluon.jit(do_not_specialize=["window_left", "window_right", "n_seqs", "seqlen_q", "seqlen_k", "kv_heads", "head_group", "head_tiles",
                              "n_tiles"],
           do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "dq_semaphore"])
def softmax_bwd_kernel(q_desc, k_desc, v_desc, do_desc, stats_desc, q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc, dk_desc,
                       dv_desc, dk_ptr, dv_ptr, dq_desc, dv_from, dv_to, counter, dq_semaphore, cu_seqlens_q, cu_seqlens_k,
                       softmax_scale, scale, window_left, window_right, n_seqs, seqlen_q, seqlen_k, kv_heads, stride_dk, stride_dv,
                       group, head_group, head_tiles, n_tiles, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WIDTH: gl.constexpr,
                       PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, ORDERED: gl.constexpr,
                       ROWS: gl.constexpr, STAGES: gl.constexpr, DQ_WARP: gl.constexpr, DQ_LAGS: gl.constexpr,
                       REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):
    """dv_from and dv_to are None, or those of `Gradients`, for launches that add up dV."""
    c = Config(HEAD_DIM=HEAD_DIM, VALUE_DIM=VALUE_DIM, WIDTH=WIDTH, VALUE_WIDTH=WIDTH, ROWS=ROWS, DQ_ROWS=ROWS, STAGES=STAGES,
               PACKED=PACKED, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, ORDERED=ORDERED, CLEARED=False, DQ_WARP=DQ_WARP, DQ_LAGS=DQ_LAGS,
               SEGMENT_BEGIN=0, SEGMENT_END=3 if HAS_LEFT else 2, OF_TILE=same_for_all, TILE=next_key_tile,
               BOUNDS=all_queries, LOAD_STEPS=all_steps, LOAD_NEXT=next_step, ROW_TILE=same_tile, LOAD_Q=load_queries, LOAD_K=load_keys,
               START=pair_start, MAINLOOP=pair_mainloop, STEP=pair_step, STORE=pair_store, BUFFER=first_buffer)
    grads = Gradients(dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk, stride_dv, HEAD_DIM, VALUE_DIM, dv_from, dv_to)
    problem = Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, kv_heads, group, head_group, head_tiles, n_tiles,
                      window_left, window_right)
    run_pair_tiles(Source(Operands(q_desc, k_desc, v_desc, do_desc), Operands(q_tail_desc, k_tail_desc, v_tail_desc, do_tail_desc),
                          stats_desc),
                   grads, dq_desc, dq_semaphore,
                   problem, (), scale, softmax_scale, REGISTERS, LOAD_REGISTERS, c)


@gluon.jit
def _add_dq(dq_desc, dq_semaphore, smem, bars, problem, own, c):
    if c.ADD_DQ is None:
        add_dq(dq_desc, dq_semaphore, smem, bars, problem, own, c)
    else:
        c.ADD_DQ(dq_desc, dq_semaphore, smem, bars, problem, own, c)


@gluon.jit
def run_pair_tiles(source, grads, dq_desc, dq_semaphore, problem, own, scale, dk_scale, REGISTERS: gl.constexpr,
                   LOAD_REGISTERS: gl.constexpr, c, columns=None):
    """run_pair with the tiles and barriers of pair_step. columns: as pair_tiles has them."""
    smem = pair_tiles(source.tensors.q.dtype, c, columns)
    run_pair(source, grads, smem, pair_barriers(c), dq_desc, dq_semaphore, problem, own, scale, dk_scale, REGISTERS, LOAD_REGISTERS, c)


@gluon.jit
def run_pair(source, grads, smem, bars, dq_desc, dq_semaphore, problem, own, scale, dk_scale, REGISTERS: gl.constexpr,
             LOAD_REGISTERS: gl.constexpr, c):
    """The warps of a backward by two consumers. own: what its hooks need beside what they are given."""
    if c.DQ_WARP:
        gl.warp_specialize([
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, c, 0)),
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, c, 1)),
            (load, (source, smem, bars, problem, own, c)),
            (_add_dq, (dq_desc, dq_semaphore, smem, bars, problem, own, c)),
        ], [4, 1, 1], [REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS])
    else:
        gl.warp_specialize([
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, c, 0)),
            (consume, (grads, smem, bars, dq_desc, problem, own, scale, dk_scale, c, 1)),
            (load, (source, smem, bars, problem, own, c)),
        ], [4, 1], [REGISTERS, LOAD_REGISTERS])
    invalidate(bars)
