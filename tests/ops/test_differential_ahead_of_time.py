"""Every tile of differential attention's Gluon kernels compiles for sm_90, fits its shared memory and keeps its products in flight."""


import pytest
from compiled_kernels import compiled_kernels

SHARED_MEMORY = 232448
KERNELS = {"differential_fwd_hopper_kernel", "differential_bwd_hopper_kernel", "differential_bwd_shared_kernel", "pair_bwd_kernel",
           "differential_bwd_preprocess_kernel", "differential_bwd_preprocess_by_branch_kernel",
           "bwd_postprocess_kernel", "bwd_tails_kernel"}
# bytes: the sums take most registers there, and the scalars of a tile move to memory, before the loops over steps and behind them
SPILLS = {"differential_fwd_hopper_kernel": 200, "differential_bwd_hopper_kernel": 280, "pair_bwd_kernel": 192}


@pytest.mark.tables
@pytest.mark.slow
def test_tiles_fit_and_do_not_spill():
    kernels = compiled_kernels("differential_ahead_of_time.py")
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"]
             or kernel["stack"] > SPILLS.get(kernel["kernel"], 0)]
    assert not wrong, "\n".join(map(str, wrong))
