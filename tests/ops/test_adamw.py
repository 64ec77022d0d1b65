"""AdamW's kernel makes torch.optim.AdamW's steps within the rounding of float32, and copies in bfloat16."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo_kernels.adamw import AdamWTensors, adamw_
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((3, 5), (1028,), (64, 130), (1,), (0, 4), (1024,))
NUMBERS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(shape, generator=generator) * 10.0 ** -(step % 4)).to(DEVICE, dtype) for shape in SHAPES]


def weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in SHAPES]


def by_torch(dtype: torch.dtype, given: torch.dtype, scale: float, steps: int) -> list[list[torch.Tensor]]:
    parameters = [w.requires_grad_() for w in weights(dtype)]
    optimizer = torch.optim.AdamW(parameters, foreach=False, **NUMBERS)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step, given), strict=True):
            parameter.grad = gradient.to(dtype) * scale
        optimizer.step()
    return [[p.detach() for p in parameters], *([optimizer.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("given, copies", [(torch.float32, False), (torch.bfloat16, True)])
def test_steps_are_those_of_pytorch(given, copies, impl):
    own = weights()
    tensors = AdamWTensors(own, own, *([torch.zeros_like(w) for w in own] for _ in range(2)),
                           [torch.full_like(w, torch.nan, dtype=torch.bfloat16) for w in own] if copies else None)
    steps, scale = 6, 0.37
    for step in range(steps):
        now = AdamWTensors(own, gradients(step, given), tensors.means, tensors.squares, tensors.copies)
        adamw_(now, step=step + 1, scale=torch.tensor(scale, device=DEVICE), impl=impl, **NUMBERS)
    eager, exact = (by_torch(dtype, given, scale, steps) for dtype in (torch.float32, torch.float64))
    for ours, same, truth in zip((own, tensors.means, tensors.squares), eager, exact, strict=True):
        for value, theirs, right in zip(ours, same, truth, strict=True):
            assert_close(value, theirs, rtol=2e-6, atol=2e-7)
            if value.numel() > 1000:
                assert_accurate(value, theirs, right)
    if copies:
        assert all(torch.equal(copy, w.to(torch.bfloat16)) for copy, w in zip(tensors.copies, own, strict=True))


def test_tensors_that_lie_askew_and_without_scale():
    memory = torch.arange(3 * 4099, dtype=torch.float32, device=DEVICE) / 1e4
    own = [memory[1:4099], memory[4099 : 2 * 4099]]
    theirs = [w.clone().requires_grad_() for w in own]
    given = [torch.ones_like(w) for w in own]
    for parameter, gradient in zip(theirs, given, strict=True):
        parameter.grad = gradient.clone()
    torch.optim.AdamW(theirs, **NUMBERS).step()
    adamw_(AdamWTensors(own, given, *([torch.zeros_like(w) for w in own] for _ in range(2))), step=1, impl="triton", **NUMBERS)
    assert_close(own, [p.detach() for p in theirs], rtol=2e-6, atol=2e-7)
    assert memory[0] == 0 and torch.equal(memory[2 * 4099 :], torch.arange(2 * 4099, 3 * 4099, device=DEVICE) / 1e4)


def test_wrong_arguments_are_refused():
    w = [torch.ones(4)]
    for error, words, given in (
        (ValueError, "tensors.gradients: must be 1", AdamWTensors(w, [], w, w)),
        (TypeError, "tensors.gradients: must be all .*float32 or all .*bfloat16, got .*float16", AdamWTensors(w, [w[0].half()], w, w)),
        (TypeError, "tensors.copies: must be all torch.bfloat16", AdamWTensors(w, w, w, w, w)),
        (ValueError, r"tensors.means: must be contiguous.* got \(5,\)", AdamWTensors(w, w, [torch.ones(5)], w)),
    ):
        with pytest.raises(error, match=words):
            adamw_(given, step=1, **NUMBERS)
