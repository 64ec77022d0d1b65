"""Sigmoid attention's forward for Hopper in Gluon: flash's, with weights that each depend on their own score only."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward_consumer import write_span
from attnzoo_kernels._gluon.forward_tile import ForwardTile
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels.flash import hopper as flash
from attnzoo_kernels.sigmoid.hooks import HOPPER_REGISTERS, HOPPER_SIGMOID, TOGETHER
from attnzoo_kernels.sigmoid.options import Options


@gluon.jit
def sigmoid(scores):
    """The sigmoid of scores in base 2."""
    powers = gl.exp2(scores)  # not in the assembly, whose branches would come between the exponentials
    return gl.inline_asm_elementwise(HOPPER_SIGMOID, HOPPER_REGISTERS, [powers], dtype=gl.float32, is_pure=True, pack=TOGETHER)


@gluon.jit
def bias_of(bias, len_k, BY_LENGTH: gl.constexpr):
    """The bias in base 2. BY_LENGTH: minus the logarithm of the number of a packed sequence's keys."""
    if BY_LENGTH:
        bias = -gl.log2(gl.maximum(len_k, 1).to(gl.float32))
    return bias


@gluon.jit
def own_bias(tensors, numbers, scale, config):
    """OWN: the bias in base 2."""
    return numbers[0]


@gluon.jit
def bias_of_span(tile, row, program, config):
    """SPAN_PARAMS: the bias in base 2."""
    return bias_of(program.own, tile.len_k, config.OPTIONS)


@gluon.jit
def weights(scores, where, program, config):
    """WEIGHTS of a sigmoid."""
    return sigmoid(scores * program.rows.scale + where[2].own)


@gluon.jit
def finish(acc, inverse, tile, span, at, epilogue_params, BRANCH: gl.constexpr, ME: gl.constexpr, program, config):
    """FINISH: stores the rows as they are, because weights need no normalisation."""
    write_span(program.descs.out, acc, span, at, ME, program)


HOOKS = (("OWN", own_bias), ("SPAN_PARAMS", bias_of_span), ("WEIGHTS", weights), ("FINISH", finish), ("ROW_MAX_NOT_NEGATIVE", False))


def forward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not (32 < q.shape[-1] <= 128 and 32 < v.shape[-1] <= 128):
        return f"head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.slopes_stride is not None:
        return "it has no alibi_slopes"
    return why_not_tma(q, k, v)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                   tile: ForwardTile | None = None) -> Tensor:
    """Output, for calls that forward_reason accepts."""
    rule = flash.Rule((*HOOKS, ("OPTIONS", options.by_length)), (options.base_2_bias(k.shape[-3]),), statistics=False)
    return flash.launch_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, None, options, tile, rule=rule)[0]
