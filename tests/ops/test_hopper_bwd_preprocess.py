"""What frames a Hopper backward's mainloop in plain Triton: copies of ends of packed sequences, the gradient of sinks, sums of dQ."""

import itertools
import math
import os

import pytest
import torch

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not (GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1")
DEVICE = "cuda" if GPU else "cpu"


def ends(x: torch.Tensor, cu_seqlens: list[int], block: int, width: int) -> torch.Tensor:
    """(sequences + 1, block, heads, width), what stands behind the last sequence as one more."""
    copies = x.new_zeros(len(cu_seqlens), block, x.shape[1], width)
    for n, (first, end) in enumerate(zip(cu_seqlens, [*cu_seqlens[1:], x.shape[0]], strict=True)):
        tail = x[first + (end - first) // block * block : end]
        copies[n, : len(tail), :, : x.shape[2]] = tail
    return copies


@pytest.mark.parametrize(("head_dim", "value_dim", "kv_heads"), [(64, 64, 2), (48, 40, 1), (64, 128, 2)])
def test_one_launch_copies_all_ends(head_dim, value_dim, kv_heads):
    from attnzoo_kernels._gluon import backward_plan
    from attnzoo_kernels._triton.call import layout

    queries, keys, width = [0, 70, 70, 198, 203], [0, 5, 133, 140, 268], backward_plan.mainloop_width(head_dim, value_dim)
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v, grad_out = (  # with room behind each row of heads
        torch.randn(tokens, heads + 1, dim, generator=generator, device=DEVICE).half()[:, :heads]
        for tokens, heads, dim in ((210, 2, head_dim), (268, kv_heads, head_dim), (268, kv_heads, value_dim), (210, 2, value_dim)))
    launch = backward_plan.all_tails(*map(layout, (q, k, v, grad_out)), len(queries) - 1, 64, 128, width)
    bounds = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (queries, keys))
    copies = backward_plan.copy_all_tails(launch, q, k, v, grad_out, *bounds)
    expected = [ends(x, of, block, width) for x, of, block in ((q, queries, 64), (k, keys, 128), (v, keys, 128), (grad_out, queries, 64))]
    for name, ours, right in zip("qkvo", copies, expected, strict=True):
        assert torch.equal(ours, right), name


@pytest.mark.parametrize(("cu_seqlens", "shape"), [(None, (2, 150, 3)), ([0, 70, 70, 198], (205, 3))])
def test_the_gradient_of_sinks_is_added_up_with_the_statistics(cu_seqlens, shape):
    """Minus the sum over the rows of each head of the sink's weight times delta, which is without the rounding of the output."""
    from attnzoo_kernels._gluon.backward_plan import frame
    from attnzoo_kernels._triton.call import layout
    from attnzoo_kernels.flash.options import Options

    generator = torch.Generator(DEVICE).manual_seed(0)
    out, residual, grad_out = torch.randn(3, *shape, 40, generator=generator, device=DEVICE).half()
    sinks = torch.randn(shape[-1], generator=generator, device=DEVICE)
    rows, inside = (shape[:-1], 150) if cu_seqlens is None else (shape[:1], 198)
    lse_shape = (rows[0], shape[-1], rows[1]) if cu_seqlens is None else (shape[-1], rows[0])
    stats = torch.randn(2, *lse_shape, generator=generator, device=DEVICE)
    stats[0, ..., inside:] = torch.inf  # as the forward has them where a row sees nothing
    grad_lse = torch.randn(lse_shape, generator=generator, device=DEVICE)
    options = Options(sequences=None if cu_seqlens is None else len(cu_seqlens) - 1, softmax_scale=1.0)
    launch, _ = frame(options, layout(out), layout(out), layout(grad_out), layout(out), 64, 64, value_dim=40, has_grad_lse=True,
                      ordered=False, residual=True, dsinks=True)
    parts = torch.full((launch.programs,), torch.nan, dtype=torch.float64, device=DEVICE)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    launch(out, residual, grad_out, stats, grad_lse, stats.new_empty(launch.programs, 1, 128), sinks, parts,
           stats.new_empty(launch.programs * 64 * 64), torch.empty(1, dtype=torch.int32, device=DEVICE), None, bounds)
    ours = parts.view(shape[0] if cu_seqlens is None else 1, shape[-1], -1).sum((0, 2))

    delta = ((out.double() + residual.double()) * grad_out.double()).sum(-1).transpose(-1, -2) - grad_lse
    weight = torch.exp2(sinks.double()[:, None] * math.log2(math.e) - stats.double().sum(0))
    exact = -(weight * delta)[..., :inside].sum((0, 2) if cu_seqlens is None else 1)
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5 * float((weight * delta).abs().sum()))


@pytest.mark.parametrize(("head_dim", "value_dim", "dq_width"), [(40, 48, 64), (128, 128, 128), (192, 128, 192), (136, 128, 192)])
@pytest.mark.parametrize(("cu_seqlens", "shape"), [(None, (2, 150, 3)), ([0, 70, 70, 198], (198, 3))])
def test_sums_of_dq_are_cleared_and_brought_into_rows(cu_seqlens, shape, head_dim, value_dim, dq_width):
    from attnzoo_kernels._gluon.backward_plan import frame, mainloop_width
    from attnzoo_kernels._triton.call import layout
    from attnzoo_kernels.flash.options import Options

    q, out = (torch.zeros(*shape, width, dtype=torch.bfloat16, device=DEVICE) for width in (head_dim, value_dim))
    dq = torch.full_like(q, torch.nan)
    options = Options(sequences=None if cu_seqlens is None else len(cu_seqlens) - 1, softmax_scale=0.5)
    before, after = frame(options, layout(q), layout(out), layout(out), layout(dq), 64, mainloop_width(value_dim), value_dim=value_dim,
                          has_grad_lse=False, ordered=False, dq_width=dq_width)
    programs = before.programs
    sums = torch.full((programs, dq_width // 8, 4, 8, 4, 2, 2), torch.nan, device=DEVICE)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    stats = torch.zeros(2, shape[0], shape[-1], shape[1], device=DEVICE)
    before(out, None, out, stats, None, stats.new_empty(programs, 1, 128), None, None, sums,
           torch.empty(1, dtype=torch.int32, device=DEVICE), None, bounds)
    if cu_seqlens is None:  # of packed sequences, some tiles belong to none
        assert torch.equal(sums, torch.zeros_like(sums))

    # a number for each tile, row and column, exact in bfloat16, in the order in which a product's threads hold them
    tile, column, row = torch.arange(programs)[:, None, None], torch.arange(dq_width), torch.arange(64)[:, None]
    rows = (tile % 8 * 8 + row % 8 + column % 32 + row // 8 / 8).to(DEVICE)
    sums[:] = rows.view(programs, 4, 2, 8, dq_width // 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
    after(sums, None, dq, bounds)
    found = dq if cu_seqlens is None else [dq[first:end] for first, end in itertools.pairwise(cu_seqlens)]
    for sequence, of_sequence in enumerate(found):
        for head in range(shape[-1]):
            first = (sequence * shape[-1] + head) * 3 if cu_seqlens is None else head * 7 + cu_seqlens[sequence] // 64 + sequence
            right = rows[first : first + 3, :, :head_dim].reshape(-1, head_dim)[: len(of_sequence)]
            assert torch.equal(of_sequence[:, head], (right * 0.5).to(dq.dtype)), (sequence, head)
