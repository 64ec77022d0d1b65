"""What the Hopper forward's plans say without a GPU."""

import itertools

import pytest
import torch

from attnzoo_kernels._triton.call import layout

pytest.importorskip("triton")


def kernels_of(width: int, length: int, packed: bool, left: int, right: int) -> tuple[frozenset, set[frozenset]]:
    """Constants of the kernel that a call launches, and of all that are compiled with it."""
    from attnzoo_kernels.flash import hopper
    from attnzoo_kernels.flash.options import Options

    shape = (length, 2, width) if packed else (1, length, 2, width)
    x = layout(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    options = Options(sequences=1 if packed else None, softmax_scale=1.0, window_left=left, window_right=right)
    launch = hopper._plan(torch.device("cpu"), torch.bfloat16, packed, False, x, x, x, options).launch
    first, *others = (frozenset(x.constants.items()) for x in (launch, *launch.others()))
    return first, {first, *others}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (64, 0)])
@pytest.mark.parametrize("width", [64, 128, 192])
def test_no_length_compiles_again(width, left, right, packed):
    lengths = (1, 64, 448, 512, 576, 640, 1024, 1088, 2048, 2112, 8192, 2**20)
    launched = [kernels_of(width, n, packed, left, right) for n in lengths]
    for (first, _), (_, compiled) in itertools.product(launched, launched):
        assert first in compiled
