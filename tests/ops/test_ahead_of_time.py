"""Every entry of FlashAttention's tile tables compiles for sm_80 and sm_90 and fits their shared memory; the 16-bit ones do not spill,
no two products of a loop have operands in the same registers, and every descriptor is made of what was set."""

import itertools

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels._triton.backward import STATS_BLOCK
from attnzoo_kernels.flash.tiles import dkdv_tile, dq_tile

SHARED_MEMORY = {80: 101376, 90: 232448}  # for sm_80 what sm_86, 89 and 120 have: they share its entries


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.tables), 90])
def test_kernels_fit_and_do_not_spill(arch):
    kernels = compiled_kernels("ahead_of_time.py", arch)
    assert len(kernels) == {80: 2 * 4 * 3, 90: (4 + 2) * 2 * 3 + 2}[arch]  # widths up to 64 have a tile for long sequences
    too_large = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY[arch]]
    spilling = [kernel for kernel in kernels if kernel["stack"] and kernel["PRECISION"] == "tf32"]
    wrong = [kernel for kernel in kernels if kernel["clash"] or kernel["stale"]]
    assert not too_large and not spilling and not wrong, "\n".join(map(str, too_large + spilling + wrong))


def test_row_statistics_cover_every_tile():
    """dK/dV reads the statistics in its own tiles, which must lie within those that dQ wrote."""
    for arch, itemsize, width, causal in itertools.product((0, 80, 86, 90, 100, 120), (2, 4), (16, 32, 64, 128, 256), (False, True)):
        dq, dkdv = dq_tile(arch, width, width, itemsize), dkdv_tile(arch, width, width, itemsize, causal=causal)
        assert STATS_BLOCK % dq.block_m == 0 and dq.block_m % dkdv.block_m == 0, (arch, itemsize, width, causal)


@pytest.mark.parametrize("arch", (80, 90, 100, 120))
def test_only_hopper_s_forward_rescales_by_warp(arch, monkeypatch):
    """Elsewhere a thread may hold other rows of a product than those that it asks for."""
    from attnzoo_kernels._triton.call import layout
    from attnzoo_kernels.flash import forward, options

    for module in (forward, options):
        monkeypatch.setattr(module, "architecture", lambda device: arch)
    x, tile = layout(torch.zeros(1, 256, 2, 64)), forward.forward_tile(arch, 64, 64, 2, causal=True, window=False)
    choice = options.Options(sequences=None, softmax_scale=0.125, window_right=0)
    launch = forward._launch(torch.device("cpu"), torch.bfloat16, True, False, False, x, x, x, choice, tile)
    assert launch.constants["BY_WARP"] == (arch == 90)
