"""Batches of sorted lengths by dynamic programming: the cheapest of all ways that brute force tries."""

import numpy as np
import pytest

from attnzoo.data.scheduling import batch_sizes

COSTS = {
    "a price for each batch": lambda rows, longest: 70 + rows * longest,
    "attention's squares": lambda rows, longest: 500 + rows * (8 * longest + longest**2),
    "batches that are fast when they are full": lambda rows, longest: longest * np.maximum(rows, 2.5) ** 0.7,
}


def total(cost, parts):
    return sum(float(cost(np.array([len(part)]), max(part))[0]) for part in parts)


def partitions(items):
    """All ways to put items into batches, whatever their order."""
    if not items:
        yield []
        return
    first, *others = items
    for rest in partitions(others):
        yield [[first], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [first, *part], *rest[i + 1 :]]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_no_other_way_is_cheaper(cost, max_rows):
    rng = np.random.default_rng(max_rows)
    for _ in range(6):
        lengths = np.sort(rng.choice([1, 16, 40, 50, 200, 210, 512], 7))
        sizes = batch_sizes(lengths, max_rows, cost)
        assert sizes.sum() == len(lengths) and 1 <= sizes.min() and sizes.max() <= max_rows
        ours = total(cost, [part.tolist() for part in np.split(lengths, np.cumsum(sizes)[:-1])])
        least = min(total(cost, parts) for parts in partitions(lengths.tolist()) if all(len(part) <= max_rows for part in parts))
        assert ours == pytest.approx(least, rel=1e-12)


def test_batches_end_where_padding_costs_more_than_another_batch():
    lengths = np.array([10] * 5 + [100] * 3)
    sizes = {price: batch_sizes(lengths, 8, lambda rows, longest, price=price: price + rows * longest).tolist() for price in (1, 10**4)}
    assert sizes == {1: [5, 3], 10**4: [8]}


def test_equal_lengths_fill_batches_and_nothing_is_no_batch():
    sizes = batch_sizes(np.full(20, 64), 8, lambda rows, longest: rows * longest)
    assert sizes.sum() == 20 and sorted(sizes)[-2:] == [8, 8] and len(sizes) == 3
    assert len(batch_sizes(np.array([], int), 8, lambda rows, longest: rows)) == 0


@pytest.mark.parametrize(("lengths", "max_rows", "message"), [([2, 1], 4, "ascending order"), ([1, 2], 0, "max_rows=0 must be at least 1")])
def test_bad_arguments(lengths, max_rows, message):
    with pytest.raises(ValueError, match=message):
        batch_sizes(np.array(lengths), max_rows, COSTS["a price for each batch"])
