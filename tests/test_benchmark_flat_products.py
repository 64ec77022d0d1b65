"""The kernel of the benchmark of flat products against float64, and a dry run."""

import csv

import pytest
import torch

from benchmarks import flat_products
from benchmarks.accuracy import error_ratio
from benchmarks.flat_products import Case, FlatTile, flat_product, make_scratch


@pytest.mark.parametrize(("rows", "outputs", "inputs"), ((1, 64, 32), (3, 100, 96), (16, 65, 200), (7, 300, 72)))
def test_products(rows, outputs, inputs):
    """Tiles of one program, of two and of many; outputs and inputs that fill no tile. Counts are zero again for the next product."""
    tile = FlatTile(64, 32, 4, 1, 2)
    scratch = make_scratch(torch.device("cpu"), outputs, tile)
    for dtype in (torch.float32, torch.float16):
        x, (weight,) = Case(rows, outputs, inputs, dtype).operands("cpu")
        exact = x.double() @ weight.double().T
        assert error_ratio(flat_product(x, weight, tile, scratch), x @ weight.T, exact) <= 1
        assert not scratch[1].any()


def test_more_rows_are_refused():
    with pytest.raises(ValueError, match="x: must have at most 16 rows, got 17"):
        flat_product(torch.zeros(17, 8), torch.zeros(8, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 16))
@pytest.mark.parametrize(("outputs", "inputs"), ((768, 3072), (4096, 4096), (1000, 1600)))
def test_products_on_a_gpu(rows, outputs, inputs):
    x, weights = Case(rows, outputs, inputs).operands("cuda", 3)
    call = flat_products.ours(x, weights)
    assert error_ratio(call(), x @ weights[0].T, x.double() @ weights[0].double().T) <= 1
    assert torch.equal(call(), call())


def test_dry_run(tmp_path):
    """On the CPU, also where there is a GPU, and without the kernels, which the other tests run."""
    options = ["--rows", "2", "--dtype", "float32", "--backends", "cublas", "copy", "--output", str(tmp_path)]
    assert flat_products.main(["--dry-run", *options]) == 0
    rows = list(csv.DictReader((tmp_path / "flat_products-speed.csv").read_text().splitlines()))
    assert {row["label"] for row in rows} == {"cublas", "copy"} and all(float(row["value"]) > 0 for row in rows)
