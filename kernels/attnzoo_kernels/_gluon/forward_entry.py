"""The Gluon kernel that most Hopper forwards share: it reads q, k and v and writes one output. The host passes a variant's hooks as
constants."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import Descriptors, Problem, Rows
from attnzoo_kernels._gluon.forward_consumer import finish
from attnzoo_kernels._gluon.forward_kernel import Config, run_tiles
from attnzoo_kernels._gluon.forward_launch import SCALARS
from attnzoo_kernels._gluon.forward_mainloop import mainloop, mask, step_mask
from attnzoo_kernels._gluon.forward_producer import produce_prefetched
from attnzoo_kernels._gluon.tile_scheduler import loaded_tiles, next_tile, read_tile, span


@gluon.jit(do_not_specialize=[*SCALARS, "own_1", "own_2"],
           do_not_specialize_on_alignment=["lse_ptr", "stats_ptr", "own_a", "own_b", "own_c", "own_d", "cu_seqlens_q", "cu_seqlens_k"])
def hopper_fwd_kernel(q_desc, k_desc, v_desc, out_desc, residual_desc, lse_ptr, stats_ptr, own_a, own_b, own_c, own_d, cu_seqlens_q,
                      cu_seqlens_k, counter, stride_stats, scale, own_1, own_2, window_left, window_right, n_seqs, seqlen_q, seqlen_k,
                      heads, group, head_group, n_tiles, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                      CONSUMERS: gl.constexpr, REGISTERS: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
                      HAS_RIGHT: gl.constexpr, MASK_IN_LOOP: gl.constexpr, Q_SLOTS: gl.constexpr, JOINT_RELEASE: gl.constexpr,
                      K_BEFORE_PV: gl.constexpr, PREFETCH_TILE: gl.constexpr, EMPTY_ROWS: gl.constexpr = False,
                      HALF_TILE: gl.constexpr = False, INDEX_EARLY: gl.constexpr = False, ROW_MAX_NOT_NEGATIVE: gl.constexpr = False,
                      PARTS: gl.constexpr = None, OUT_SLOTS: gl.constexpr = None, OPTIONS: gl.constexpr = None,
                      TILE_WORDS: gl.constexpr = None, OWN: gl.constexpr = None, PRODUCE: gl.constexpr = produce_prefetched,
                      NEXT_TILE: gl.constexpr = next_tile, LOAD_TILE: gl.constexpr = None, READ_TILE: gl.constexpr = read_tile,
                      LOADED_TILES: gl.constexpr = loaded_tiles, SPAN: gl.constexpr = span, SPAN_PARAMS: gl.constexpr = None,
                      EPILOGUE_PARAMS: gl.constexpr = None, MAINLOOP: gl.constexpr = mainloop, ADD_SINK: gl.constexpr = None,
                      LOAD_BIAS: gl.constexpr = None, KEY_BIAS: gl.constexpr = None, TILE_BIAS: gl.constexpr = None,
                      UNMASKED_FROM: gl.constexpr = None, SCORE: gl.constexpr = None, MASK: gl.constexpr = mask,
                      STEP_MASK: gl.constexpr = step_mask, LSE_BIAS: gl.constexpr = None, WEIGHTS: gl.constexpr = None,
                      FINISH: gl.constexpr = finish):
    """OWN turns the arguments that begin with own_ into the program's `own`, which the variant's other hooks read."""
    config = Config(BLOCK_N=BLOCK_N, BLOCK_DV=BLOCK_DV, STAGES=STAGES, CONSUMERS=CONSUMERS, REGISTERS=REGISTERS, PACKED=PACKED,
                    HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT, BRANCHES=1, MASK_IN_LOOP=MASK_IN_LOOP, EMPTY_ROWS=EMPTY_ROWS,
                    Q_SLOTS=Q_SLOTS, Q_IN_REGISTERS=Q_SLOTS == 1 and PARTS is None, JOINT_RELEASE=JOINT_RELEASE,
                    INDEX_EARLY=INDEX_EARLY, K_BEFORE_PV=K_BEFORE_PV, HALF_TILE=HALF_TILE, PREFETCH_TILE=PREFETCH_TILE,
                    ROW_MAX_NOT_NEGATIVE=ROW_MAX_NOT_NEGATIVE, PARTS=PARTS, OUT_SLOTS=OUT_SLOTS, TILE_WORDS=TILE_WORDS, OPTIONS=OPTIONS,
                    PRODUCE=PRODUCE, NEXT_TILE=NEXT_TILE, LOAD_TILE=LOAD_TILE, READ_TILE=READ_TILE, LOADED_TILES=LOADED_TILES, SPAN=SPAN,
                    SPAN_PARAMS=SPAN_PARAMS, EPILOGUE_PARAMS=EPILOGUE_PARAMS, MAINLOOP=MAINLOOP, ADD_SINK=ADD_SINK, LOAD_BIAS=LOAD_BIAS,
                    KEY_BIAS=KEY_BIAS, TILE_BIAS=TILE_BIAS, UNMASKED_FROM=UNMASKED_FROM, SCORE=SCORE, MASK=MASK, STEP_MASK=STEP_MASK,
                    LSE_BIAS=LSE_BIAS, WEIGHTS=WEIGHTS, FINISH=FINISH)
    own = ()
    if OWN is not None:
        own = OWN((own_a, own_b, own_c, own_d), (own_1, own_2), scale, config)
    run_tiles(Descriptors(q_desc, k_desc, v_desc, out_desc, residual_desc),
              Problem(counter, cu_seqlens_q, cu_seqlens_k, n_seqs, seqlen_q, seqlen_k, heads, group, head_group, n_tiles, window_left,
                      window_right), Rows(scale, lse_ptr, stats_ptr, stride_stats), own, config)
