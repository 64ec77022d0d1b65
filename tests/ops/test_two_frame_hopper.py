"""The Gluon path of attention in two frames: its numbers under the 2x rule, and what its launches promise."""

from dataclasses import replace

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels import two_frame, two_frame_attention
from attnzoo_kernels.two_frame.cases import CORRECTNESS, LARGE, Case
from benchmarks.accuracy import assert_accurate

SHARED_MEMORY = 232448
SPILLS = 192  # bytes, of flash's backward, outside the loop over its queries; the forward has none
SPILLS_IN_TWO_LOOPS = 8  # of the forward
# borders on a tile's edge and beside it, inside the first tile and behind the last key
BORDERS = tuple(Case(seqlen_q=n, heads=2, kv_heads=1, head_dim=d, near_keys=w, far_keys=far)
                for d in (64, 128) for n, w, far in ((128, 128, None), (385, 129, None), (700, 1, None), (700, 64, 3), (513, 127, 200),
                                                     (300, 1000, 4), (2000, 700, 0)))
UNLIKE = tuple(Case(batch=2, seqlen_q=m, seqlen_k=n, heads=4, kv_heads=2, head_dim=d, near_keys=100, far_keys=far)
               for d, far in ((64, None), (128, 50)) for m, n in ((1, 777), (192, 384), (333, 777), (777, 333), (256, 192)))
OTHERS = (
    Case(seqlen_q=777, heads=2, head_dim=96, value_dim=40, near_keys=200),
    Case(seqlen_q=777, heads=2, head_dim=64, value_dim=128, near_keys=200),
    Case(batch=2, seqlen_q=500, heads=2, kv_heads=1, head_dim=40, near_keys=77, strided=True),
    Case(seqlen_q=500, heads=1, head_dim=128, near_keys=77, q_scale=30.0),
)
PACKED = tuple(Case(lengths_q=lengths, lengths_k=keys, heads=4, kv_heads=2, head_dim=d, near_keys=150, far_keys=far)
               for d, far in ((64, None), (128, None), (64, 20)) for lengths, keys in (
                   ((1, 0, 700, 129, 1000, 0), None), ((17, 0, 600, 5, 90), (970, 33, 170, 0, 640))))
# the last tile of queries has one query, and none of its far keys needs a mask (fault 22)
ALONE = tuple(Case(**lengths, heads=2, head_dim=d, near_keys=near) for d in (64, 128) for near in (1, 129)
              for lengths in ({"seqlen_q": 257}, {"seqlen_q": 385}, {"lengths_q": (257,)}, {"lengths_q": (385, 15, 513, 0, 257)}))
COVERED = [replace(case, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)
           for case in BORDERS + UNLIKE + OTHERS + PACKED + ALONE + CORRECTNESS + LARGE
           if 32 < case.head_dim <= 128 and 32 < (case.value_dim or 64) <= 128 and (case.value_dim or 64) % 8 == 0]


def run(inputs, impl: str | None, dtype: torch.dtype | None = None, deterministic: bool = False) -> dict[str, torch.Tensor]:
    """Output, LSE and all gradients of a loss on both."""
    tensors = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs[:3]]
    out, lse = two_frame_attention(*tensors, **inputs.options, return_lse=True, impl=impl, deterministic=deterministic)
    dlse = torch.randn(lse.shape, generator=torch.Generator(lse.device).manual_seed(6), device=lse.device)
    grads = torch.autograd.grad([out, lse], tensors, [inputs.dout.to(out.dtype), dlse.to(lse.dtype)])
    lse = lse.detach().masked_fill(lse == -torch.inf, 7.0)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse, *grads), strict=True))


@pytest.mark.hopper
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_error_is_at_most_twice_that_of_eager(case, poisoned):
    inputs = case.inputs("cuda")
    assert_accurate(run(inputs, "gluon"), run(inputs, "reference"), run(inputs, "reference", torch.float64))


@pytest.mark.hopper
@pytest.mark.parametrize("case", [PACKED[0], *(Case(batch=2, seqlen_q=4096, heads=8, head_dim=d, near_keys=999) for d in (64, 128))],
                         ids=str)
def test_repeats_are_bitwise_equal(case):
    inputs = case.inputs("cuda")
    first = run(inputs, "gluon", deterministic=True)
    for n in range(30):
        again = run(inputs, "gluon", deterministic=True)
        different = [name for name, x in again.items() if not torch.equal(first[name], x)]
        assert not different, (n, different)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("far_keys", (None, 50))
def test_nothing_depends_on_what_lies_beyond_a_sequence(far_keys, head_dim):
    """Packed sequences with NaN in their neighbours, and in the tokens behind the last one."""
    total, rows = 900, slice(111, 650)
    bounds = torch.tensor((0, 111, 650, 763, 763), dtype=torch.int32, device="cuda")
    tensors = [torch.randn(total, 2, *frames, head_dim, device="cuda", generator=torch.Generator("cuda").manual_seed(i)).half()
               for i, frames in enumerate(((2,), (2,), (), ()))]
    poisoned = [x.clone() for x in tensors]
    for x in poisoned:
        x[: rows.start] = torch.nan
        x[rows.stop:] = torch.nan
    results = []
    for q, k, v, dout in (tensors, poisoned):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = two_frame_attention(*leaves, near_keys=100, far_keys=far_keys, cu_seqlens_q=bounds, cu_seqlens_k=bounds, return_lse=True,
                                       impl="gluon", deterministic=True)
        out.backward(dout)
        assert (out[763:] == 0).all() and (lse[:, 763:] == -torch.inf).all() and all((x.grad[763:] == 0).all() for x in leaves)
        results.append([out[rows], lse[:, rows], *(x.grad[rows] for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.hopper
def test_none_takes_gluon_where_it_holds_and_a_named_path_is_refused_elsewhere():
    inputs = Case(seqlen_q=300, heads=2, dtype=torch.bfloat16).inputs("cuda")
    by_name, by_itself = run(inputs, "gluon", deterministic=True), run(inputs, None, deterministic=True)
    assert all(torch.equal(by_name[name], by_itself[name]) for name in by_name)
    narrow = Case(seqlen_q=30, head_dim=32).inputs("cuda")
    assert "head_dim and value_dim must be 33 to 128, got 32 and 32" in two_frame.why_not_gluon(*narrow[:3], **narrow.options)


@pytest.mark.slow
def test_kernels_compile_without_complaints():
    kernels = compiled_kernels("two_frame_hopper_ahead_of_time.py")
    assert {kernel["kernel"] for kernel in kernels} == {"hopper_fwd_kernel", "pair_bwd_kernel"} and len(kernels) == 8
    allowed = [SPILLS if k["kernel"] == "pair_bwd_kernel" else SPILLS_IN_TWO_LOOPS if k["in_two_loops"] else 0 for k in kernels]
    wrong = [kernel for kernel, most in zip(kernels, allowed, strict=True)
             if not all(kernel["in_two_loops"] and "of a descriptor" in complaint for complaint in kernel["complaints"])  # fault 22
             or kernel["shared"] > SHARED_MEMORY or kernel["stack"] > most]
    assert not wrong, "\n".join(map(str, wrong))
