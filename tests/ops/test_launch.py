"""Launches below Triton's own: the compiled kernel gets what Triton's launcher would have given it."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction

from attnzoo_kernels import (
    BlockLayout,
    block_sparse_attention,
    differential_attention,
    dual_chunk_attention,
    flash_attention,
    sigmoid_attention,
)
from attnzoo_kernels._triton import launch
from attnzoo_kernels._triton.launch import Launch, descriptor
from attnzoo_kernels.dual_chunk.cases import rotary_tables
from benchmarks.accuracy import assert_accurate

METAS = [{"number": n} for n in range(3)]
POSITIONS = (0, 1, 3)  # of the descriptors among the arguments


def encoded(x, meta):
    """In the place of Triton's: what an encoding depends on."""
    return [(meta["number"], x.base.data_ptr(), tuple(x.block_shape)), *x.shape, *x.strides]


class Launcher(driver.CudaLauncher):
    """As Triton builds it: `launch` encodes descriptors and calls `launcher`."""

    def __init__(self, seen):
        def launcher(*arguments):
            seen.append([x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])

        def inner(*arguments):
            metas = iter(METAS)
            launcher(*(part for n, x in enumerate(arguments) for part in (encoded(x, next(metas)) if n in POSITIONS else [x])))

        self.launch = inner

    def __call__(self, grid_x, grid_y, grid_z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.launch(*arguments)


class Compiled:
    def __init__(self, seen):
        self.run, self.function, self.packed_metadata = Launcher(seen), 1, (4, 1, 0)
        self.metadata = SimpleNamespace(tensordesc_meta=METAS)

    def __getitem__(self, grid):
        return lambda *arguments, **_: self.run(*grid, 0, 1, None, None, None, None, *arguments)


@pytest.mark.parametrize("caller_describes", (False, True))
def test_later_launches_pass_what_the_first_passed(caller_describes, monkeypatch):
    monkeypatch.setattr(driver, "make_tensordesc_arg", encoded)
    active = SimpleNamespace(get_current_stream=lambda device: 0, get_current_device=lambda: 0)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    seen: list[list] = []
    blocks = {0: (64, 16), 1: (32, 16), 3: (64, 32)}
    made = Launch({(3,): lambda *_, **__: Compiled(seen)}, 3, (5, 0.5), {"BLOCK": 64}, 4, 2, {} if caller_describes else blocks)
    for launches in (2, 3):  # other addresses the second time; the very first call compiles
        tensors = [torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16), torch.zeros(3), torch.zeros(2, 8, 2, 32), None]
        given = [descriptor(x, *blocks[n]) if caller_describes and n in blocks else x for n, x in enumerate(tensors)]
        expected = []
        metas = iter(METAS)
        for n, x in enumerate(tensors):
            expected += encoded(descriptor(x, *blocks[n]), next(metas)) if n in blocks else [None if x is None else x.data_ptr()]
        for _ in range(3):
            made(*given)
        assert seen == [[*expected, 5, 0.5, 64]] * launches
        seen.clear()
    assert made.direct


def test_constants_that_are_left_out_are_passed_as_well():
    """Only the first launch goes by names; the later ones would have an argument too few."""
    def kernel(x, n, FIRST: tl.constexpr, MIDDLE: tl.constexpr = 5, LAST: tl.constexpr = True):
        pass

    assert list(Launch(JITFunction(kernel), 1, (2,), {"LAST": False, "FIRST": 1}, 4, 1).constants.items()) == [
        ("FIRST", 1), ("MIDDLE", 5), ("LAST", False)]


@pytest.mark.parametrize("widths, copied", [((40, 16), True), ((64, 32), True), ((64, 40), False), ((33, 64), True), ((100, 100), True)])
def test_rows_that_tma_cannot_read_are_copied_for_narrow_values_and_odd_widths(widths, copied, monkeypatch):
    monkeypatch.setattr(launch, "architecture", lambda where: 90)
    q, k, v = (torch.randn(2, 8, 2, width + 3).half()[..., 1 : 1 + width] for width in (widths[0], *widths))
    readable = launch.readable(q, k, v)
    assert (readable is not None) == copied
    for x, copy in zip((q, k, v), readable or (), strict=False):
        assert launch.tma_takes(copy) and torch.equal(copy[..., : x.shape[-1]], x)
        assert copy.shape[-1] % 8 == 0
    of_two = torch.randn(2, 8, 4, widths[0]).half()[:, :, ::2]  # read as it is where q cannot be, but of q's width
    readable = launch.readable(q, of_two, v)
    assert (readable is not None) == copied
    assert not copied or readable[1].shape == readable[0].shape and torch.equal(readable[1][..., : widths[0]], of_two)
    expanded = torch.randn(2, 8, 1, widths[1]).half().expand(-1, -1, 2, -1)
    assert (launch.readable(q.contiguous(), k.contiguous(), expanded) is not None) == copied


@pytest.mark.parametrize("width", (16, 24, 20))
def test_gradients_of_narrow_values_are_copied_once_whatever_their_strides(width, monkeypatch):
    """A consumer that transposes hands over such a gradient of the output; its copy must be one that needs no copy."""
    monkeypatch.setattr(launch, "architecture", lambda where: 90)
    q, k, v, out = torch.randn(4, 2, 8, 2, width).half()
    grad_out = torch.randn(2, 8, width, 2).half().mT
    assert grad_out.stride(-1) != 1
    copies = launch.readable(q, k, v, out, grad_out)
    assert torch.equal(copies[4][..., :width], grad_out) and copies[4].is_contiguous()
    assert launch.readable(*copies) is None


@pytest.mark.slow
@pytest.mark.parametrize("value_dim", (16, 32))
@pytest.mark.parametrize("packed", (False, True))
def test_narrow_values_that_tma_cannot_read(value_dim, packed, device):
    """By pointers they were wrong on Hopper, and read elsewhere."""
    n = 300 if device == "cuda" else 70  # the interpreter takes its time
    q, k = (torch.randn(2, n, heads, 40, device=device).half() for heads in (4, 2))
    values = torch.randn(2, n, 1, value_dim, device=device).half().expand(-1, -1, 2, -1)
    bounds = torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device)
    packing = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": n, "max_seqlen_k": n} if packed else {}
    results = []
    for v in (values, values.contiguous()):
        tensors = [x.flatten(0, 1) if packed else x for x in (q, k)] + [v.reshape(2 * n, 2, value_dim) if packed else v]
        if packed and v is values:
            tensors[2] = v[:, :, :1].reshape(2 * n, 1, value_dim).expand(-1, 2, -1)
        tensors = [x.detach().requires_grad_() for x in tensors]
        out = flash_attention(*tensors, causal=True, impl="triton", **packing)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    eager = flash_attention(*tensors, causal=True, impl="reference", **packing)
    exact = flash_attention(*(x.double() for x in tensors), causal=True, impl="reference", **packing)
    assert_accurate(out, eager, exact)


@pytest.mark.parametrize("operator", ("flash", "block_sparse", "differential", "dual_chunk", "sigmoid"))
def test_gradients_of_one_head_for_all_with_the_batch_last_in_memory(operator, device):
    """torch.empty_like gives such keys a last stride of 2, over which kernels that write whole rows would pass."""
    q, dout = torch.randn(2, 1, 5, 2, 16, device=device)
    k, v = torch.randn(2, 5, 1, 16, 1, device=device).permute(0, 4, 1, 2, 3).expand(2, 1, 5, 2, 16)
    assert torch.empty_like(k).stride(-1) == 2

    def attend(q, k, v, impl):
        if operator == "flash":
            return flash_attention(q, k, v, impl=impl)
        if operator == "sigmoid":
            return sigmoid_attention(q, k, v, impl=impl)
        if operator == "block_sparse":
            layout = BlockLayout.from_mask(torch.ones(1, 1, dtype=torch.bool, device=device), 16)
            return block_sparse_attention(q, k, v, layout, impl=impl)
        if operator == "differential":
            return differential_attention(q, q.flip(1), k, None, v, torch.tensor(0.5, device=device), impl=impl)
        cos, sin = rotary_tables(8, 16, device=device)
        return dual_chunk_attention(q, k, v, cos=cos, sin=sin, chunk_size=8, local_size=2, causal=True, impl=impl)

    results = []
    for impl in ("triton", "reference"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        results.append(torch.autograd.grad(attend(*leaves, impl), leaves, dout))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
