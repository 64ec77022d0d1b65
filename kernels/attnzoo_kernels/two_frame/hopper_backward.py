"""The backward of attention in two frames on Hopper: flash's, one launch for the far frame's window and one for the near frame's.

Both read the statistics of the one softmax. The sum of dV goes from the first launch to the second in float32.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo_kernels._gluon.backward_plan import mainloop_width
from attnzoo_kernels._gluon.backward_tiles import KEYS
from attnzoo_kernels._gluon.hopper import why_not_tma
from attnzoo_kernels.checks import UNLIMITED
from attnzoo_kernels.flash import hopper_backward as flash
from attnzoo_kernels.two_frame.options import Options

# the far window ends before the query's own key, so its window_right is negative
RULE = flash.Rule((("HAS_RIGHT", True),))


def backward_reason(q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Why this path does not take the call; None if it does."""
    if not 32 < max(q.shape[-1], v.shape[-1]) <= 128:
        return f"the wider of head_dim and value_dim must be 33 to 128, got {q.shape[-1]} and {v.shape[-1]}"
    if options.packed and options.far_keys < UNLIMITED:
        return "it takes no packed sequences with far_keys"
    return why_not_tma(q, k, v)


def launch_backward(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor,
                    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
                    deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV, as the plain path's launch_backward gives them, for calls that backward_reason accepts."""
    dv = v.new_empty(v.shape)
    sequences, _, seqlen_k = options.sizes(q.shape, k.shape)
    far = replace(options, window_right=-options.near_keys)
    near = replace(options, window_left=options.near_keys - 1)
    (q_near, q_far), (k_near, k_far) = ((x[..., ::2, :], x[..., 1::2, :]) for x in (q, k))

    def frame(queries, keys, values, of_frame, into_dv, dv_sums=(None, None)):
        """dQ and dK."""
        into = queries.new_empty(queries.shape), keys.new_empty(keys.shape), into_dv
        flash.launch_backward(grad_out, grad_lse, queries, keys, values, out, stats, cu_seqlens_q, cu_seqlens_k, of_frame, deterministic,
                              into=into, rule=RULE, dv_sums=dv_sums)
        return into[:2]

    if options.packed or options.far_keys >= seqlen_k:
        tiles = options.programs(v.shape[-2], seqlen_k, sequences, KEYS.value)
        sums = stats.new_empty(tiles * KEYS.value * mainloop_width(q.shape[-1], v.shape[-1]))
        null = stats.new_empty(0)
        dq_far, dk_far = frame(q_far, k_far, v, far, dv, (null, sums))
        dq_near, dk_near = frame(q_near, k_near, v, near, dv, (sums, null))
    else:
        seen = slice(0, options.far_keys)
        dq_near, dk_near = frame(q_near, k_near, v, near, dv)
        dq_far, dk_far = torch.zeros_like(dq_near), torch.zeros_like(dk_near)
        if options.far_keys > 0:
            # far keys count as a sequence of their own; the window says where it lies relative to the queries
            far = replace(far, window_right=seqlen_k - options.far_keys - options.near_keys)
            added = v[:, seen].new_empty(v[:, seen].shape)
            dq_far, dk_far[:, seen] = frame(q_far, k_far[:, seen], v[:, seen], far, added)
            dv[:, seen] += added
    dq, dk = (torch.stack(x, -2).flatten(-3, -2) for x in ((dq_near, dq_far), (dk_near, dk_far)))
    return dq, dk, dv
