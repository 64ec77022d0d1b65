"""The kernel that rounds matrices to 8 bits and transposes them: the bits that PyTorch gives."""

import pytest
import torch
from compiled_kernels import compiled_kernels

from attnzoo_kernels.fp8 import ops, rounded, rounded_both_ways

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((33, 50), (16, 16), (64, 32), (200, 300), (5, 128), (1, 1))


@pytest.fixture(autouse=True)
def _needs_8_bits():
    if DEVICE == "cuda" and not ops.has_kernels(torch.device(DEVICE)):
        pytest.skip("PyTorch rounds there")


def check_transposed(found: torch.Tensor, x: torch.Tensor) -> None:
    rows, columns = x.shape
    assert found.shape == (columns, -(-rows // 16) * 16) and found.is_contiguous() and found.dtype == x.dtype
    assert torch.equal(found[:, :rows].view(torch.uint8), x.t().contiguous().view(torch.uint8))
    assert not found[:, rows:].float().any()


@pytest.mark.parametrize("kind", (torch.float8_e4m3fn, torch.float8_e5m2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_rounds_as_pytorch_does(shape, dtype, kind, poisoned):
    from attnzoo_kernels.fp8.rounding import launch_rounding

    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    torch.manual_seed(0)
    x = (torch.randn(shape, device=DEVICE) * torch.logspace(-4, 2, shape[1], device=DEVICE)).to(dtype)
    values, unit = rounded(x, kind)
    found, by_columns, of_found = launch_rounding(x, kind)
    assert torch.equal(of_found, unit) and torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    check_transposed(by_columns, values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_transposed(shape, poisoned):
    from attnzoo_kernels.fp8.rounding import transposed

    x = torch.randn(shape, device=DEVICE).to(torch.float8_e5m2)
    check_transposed(transposed(x), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_are_one_rounding(shape):
    x = torch.randn(shape[::-1], device=DEVICE).t()  # not contiguous
    values, by_columns, unit = rounded_both_ways(x, torch.float8_e4m3fn)
    expected, of_x = rounded(x, torch.float8_e4m3fn)
    assert torch.equal(unit, of_x) and torch.equal(values.float(), expected.float())
    check_transposed(by_columns, values)


@pytest.mark.parametrize("value", (torch.inf, -torch.inf, torch.nan))
def test_what_is_no_number_makes_a_row_or_all_nan(value):
    """With an infinity the unit is one, too, so that a product with it is NaN."""
    from attnzoo_kernels.fp8.rounding import launch_rounding

    x = torch.randn(20, 40, device=DEVICE)
    x[3, 5] = value
    values, unit = rounded(x, torch.float8_e4m3fn)
    found, by_columns, of_found = launch_rounding(x, torch.float8_e4m3fn)
    assert torch.equal(of_found.isnan(), unit.isnan()) and torch.equal(of_found.isinf(), unit.isinf())
    for each in (values, found, by_columns[:, :20].t()):
        assert (each.float() * unit).isnan().all()


def test_the_operator_is_sound():
    x = torch.randn(33, 48, device=DEVICE)
    torch.library.opcheck(torch.ops.attnzoo.round_both_ways, (x, torch.float8_e4m3fn))
    assert ops.filled(33) == 48


def test_the_largest_element_is_found_wherever_it_stands(monkeypatch):
    from attnzoo_kernels.fp8 import rounding

    monkeypatch.setattr(rounding, "PROGRAMS", 4)
    monkeypatch.setattr(rounding, "BLOCK", 16)
    for place in (0, 15, 16, 63, 64, 130, 149):
        x = torch.rand(150, device=DEVICE)
        x[place] = -7.5
        assert rounding.launch_rounding(x.view(3, 50), torch.float8_e4m3fn)[2] == 7.5 / 448


@pytest.mark.slow
@pytest.mark.parametrize("arch", (90, 100))
def test_no_rounded_pair_is_joined_and_used_alone(arch):
    kernels = compiled_kernels("fp8_rounding_ahead_of_time.py", arch)
    assert len(kernels) == 13 and not any(k["used_twice"] for k in kernels), kernels
    assert not any(k["stack"] for k in kernels if "(64" in k["form"]), kernels  # products have widths of 16 and more
