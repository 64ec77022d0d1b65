"""Launches below Triton's own: the compiled kernel gets what Triton's launcher would have given it."""

import random
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from attnzoo_kernels import (
    BlockLayout,
    block_sparse_attention,
    differential_attention,
    dual_chunk_attention,
    flash_attention,
    sigmoid_attention,
)
from attnzoo_kernels._gluon.hopper import descriptor as hopper_descriptor
from attnzoo_kernels._triton import launch
from attnzoo_kernels._triton.launch import Launch, descriptor
from attnzoo_kernels.dual_chunk.cases import rotary_tables
from benchmarks.accuracy import assert_accurate

METAS = [{"number": n} for n in range(16)]
POSITIONS = (0, 1, 3)  # of the descriptors among the arguments


def encoded(x, meta):
    """In the place of Triton's: what an encoding depends on."""
    return [(meta["number"], x.base.data_ptr(), tuple(x.block_shape)), *x.shape, *x.strides]


class Launcher(driver.CudaLauncher):
    """As Triton builds it: `launch` encodes descriptors and calls `launcher`."""

    def __init__(self, seen, positions):
        def launcher(*arguments):
            seen.append([x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])

        def inner(*arguments):
            metas = iter(METAS)
            launcher(*(part for n, x in enumerate(arguments) for part in (encoded(x, next(metas)) if n in positions else [x])))

        self.launch = inner

    def __call__(self, grid_x, grid_y, grid_z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.launch(*arguments)


class Compiled:
    def __init__(self, seen, positions=POSITIONS):
        self.run, self.function, self.packed_metadata = Launcher(seen, positions), 1, (4, 1, 0)
        self.metadata, self.launch_metadata = SimpleNamespace(tensordesc_meta=METAS[: len(positions)]), lambda *_: None

    def __getitem__(self, grid):
        return lambda *arguments, **_: self.run(*grid, 0, 1, None, None, None, None, *arguments)


@pytest.fixture
def seen(monkeypatch) -> list[list]:
    """The arguments of launches on a Hopper GPU that is not here."""
    device = object()  # of no other test: Triton keeps kernels by device
    active = SimpleNamespace(get_current_stream=lambda device: 0, get_current_device=lambda: device, launcher_cls=driver.CudaLauncher,
                             get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(launch.driver, "_active", active)
    monkeypatch.setattr(launch, "_LAUNCHERS", {})
    monkeypatch.setattr(driver, "make_tensordesc_arg", encoded)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return []


@pytest.fixture
def by_triton(seen, monkeypatch) -> list[str]:
    """The names of kernels that Triton itself launches, which compiles nothing."""
    def do_compile(self, key, signature, device, *_):
        positions = [n for n, x in enumerate(signature.values()) if str(x).startswith("tensordesc")]
        compiled = self.device_caches[device][0][key] = Compiled(seen, positions)
        return compiled

    def run(self, *args, warmup, **options):
        launched.extend(() if warmup else [self.fn.__name__])
        return of_triton(self, *args, warmup=warmup, **options)

    launched: list[str] = []
    of_triton = JITFunction.run
    monkeypatch.setattr(JITFunction, "_do_compile", do_compile)
    monkeypatch.setattr(JITFunction, "run", run)
    return launched


@pytest.mark.parametrize("caller_describes", (False, True))
def test_later_launches_pass_what_the_first_passed(caller_describes, seen):
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


def test_a_launch_finds_the_kernel_that_triton_would_take(seen, by_triton, monkeypatch):
    """Triton itself launches every kernel once, whatever the arguments; what later launches pass is the same."""
    def plain(x, y, z, n, m, scale, FIRST: tl.constexpr, MIDDLE: tl.constexpr = 5, LAST: tl.constexpr = True):
        pass

    def hook():
        pass

    kernels = [JITFunction(plain, do_not_specialize=["m"]), GluonJITFunction(plain), JITFunction(plain, debug=True)]
    hook, pick = JITFunction(hook), random.Random(0).choice
    rows = torch.zeros(4, 8, 2, 64)
    tensors = [rows, rows[1], rows.half(), rows.flatten()[1:], rows.flatten()[4:], None]
    described = [*(descriptor(x, n, width) for x, n, width in ((rows, 16, 64), (rows[:2], 16, 64), (rows, 32, 64), (rows, 16, 32))),
                 *(hopper_descriptor(x, n, 64) for x, n in ((rows.half(), 64), (rows.bfloat16(), 64), (rows[:3].half(), 64)))]
    numbers = [1, 2, 16, 17, 48, 2**31 - 1, 2**31, 2**32, 2**40 + 1, -1, True]
    chosen: list = [rows, tensors[1], described[0], 16, 16, 0.5, {"FIRST": 1}, {}, 4, 1, kernels[0], False]
    choices = [tensors, tensors, tensors + described, numbers, numbers, [0.5, 1.0, 2.0, 3],
               [{"FIRST": x, **more} for x in (0, 1, "a", None, hook, tl.float16) for more in ({}, {"LAST": False}, {"MIDDLE": 5})],
               [{}, {"maxnreg": 128}, {"debug": True}], [4, 8], [1, 2], kernels, [False, True]]
    found = 0
    for _ in range(1500):
        n = pick(range(len(choices)))
        chosen[n] = pick(choices[n])
        *tensors, n, m, scale, constants, options, warps, stages, kernel, debug = chosen
        monkeypatch.setattr(knobs.runtime, "debug", debug)
        named = constants | {"num_warps": warps, "num_stages": stages} | options
        before, known = len(by_triton), set(launch._LAUNCHERS)
        made = Launch(kernel, 3, (n, m, scale), constants, warps, stages, options=options)
        made(*tensors)
        assert made.compiled is kernel.warmup(*tensors, n, m, scale, **named, grid=(3,))
        assert (len(by_triton) == before) == (made.compiled in known)
        found += made.compiled in known
        kernel[(3,)](*tensors, n, m, scale, **named)
        made(*tensors)
        assert seen[0] == seen[1] == seen[2] and len(seen) == 3
        assert seen[0][-2:] == [constants.get("MIDDLE", 5), constants.get("LAST", True)]
        seen.clear()
    assert found > 200 and len(launch._LAUNCHERS) > 200
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda: ("key", "hash"))  # Triton would compile anew
    by_triton.clear()
    Launch(kernel, 3, (n, m, scale), constants, warps, stages, options=options)(*tensors)
    assert by_triton


@pytest.mark.parametrize("causal", (False, True))
def test_a_new_number_of_packed_tokens_launches_the_kernels_of_others(causal, seen, by_triton, monkeypatch):
    from attnzoo_kernels._gluon import forward_launch
    from attnzoo_kernels.flash import hopper, hopper_backward
    from attnzoo_kernels.flash.options import Options

    for module in (forward_launch, hopper_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "tile_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    bounds, options = torch.zeros(3, dtype=torch.int32), Options(sequences=2, softmax_scale=0.125, window_right=0 if causal else -1)
    for total in (300, 301, 304, 333, 350):
        q, k, v, dout = torch.zeros(4, total, 1, 64, dtype=torch.bfloat16)
        out, _, stats = hopper.launch_forward(q, k, v, bounds, bounds, None, options)
        hopper_backward.launch_backward(dout, None, q, k, v, out, stats, bounds, bounds, options, False)
    assert {"hopper_fwd_kernel", "pair_bwd_kernel"} <= set(by_triton)  # the interpreter has the plain ones
    assert len(by_triton) == len(set(by_triton)) == len(seen) / 5


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
