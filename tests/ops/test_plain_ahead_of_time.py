"""Plain kernels of flash with all its options, block_sparse, dual_chunk, routed attention and of training compile for sm_90, fit its
shared memory, spill little."""

import pytest
from compiled_kernels import compiled_kernels

SHARED_MEMORY = 232448
LEAST_SHARED_MEMORY = 101376  # of the GPUs that have least
SPILLED = 512  # bytes of stack a thread; the most is 296, of 16-bit packed dK/dV at head dim 128


@pytest.mark.slow
@pytest.mark.parametrize("operator, count", (
    ("flash", 40), pytest.param("ranges", 16, marks=pytest.mark.tables),
    pytest.param("block_sparse", 24, marks=pytest.mark.tables), pytest.param("dual_chunk", 22, marks=pytest.mark.tables), ("routed", 80),
    ("training", 10)))
def test_kernels_fit_spill_little_and_read_several_numbers_at_once(operator, count):
    kernels = compiled_kernels("plain_ahead_of_time.py", 90, operator)
    assert len(kernels) == count
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["stack"] > SPILLED or kernel["stale"]
             or (kernel["narrow"] > 4 and not kernel["wide"])]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
@pytest.mark.tables
def test_kernels_of_chosen_blocks_fit_smaller_gpus():
    kernels = [kernel for kernel in compiled_kernels("plain_ahead_of_time.py", 86, "routed") if "walk" in kernel["kernel"]]
    assert len(kernels) == 22
    wrong = [kernel for kernel in kernels if kernel["shared"] > LEAST_SHARED_MEMORY or kernel["stack"] > SPILLED]
    assert not wrong, "\n".join(map(str, wrong))
