"""Every tile of differential attention's Gluon kernels compiles for sm_90, fits its shared memory and keeps its products in flight."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 232448
KERNELS = {"differential_fwd_hopper_kernel", "differential_bwd_hopper_kernel", "differential_bwd_shared_kernel", "flash_bwd_pair_kernel",
           "differential_bwd_rows_kernel", "differential_bwd_parts_rows_kernel", "differential_bwd_dq_rows_kernel",
           "flash_bwd_dq_rows_kernel", "flash_bwd_tails_kernel"}
# the sums take most registers there: the scalars of a tile move to memory, before the loops over steps and behind them
SPILLS = {"differential_fwd_hopper_kernel", "differential_bwd_hopper_kernel", "flash_bwd_pair_kernel"}


@pytest.mark.slow
def test_tiles_fit_and_do_not_spill():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, Path(__file__).with_name("differential_ahead_of_time.py"), "90"], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels} == KERNELS
    wrong = [kernel for kernel in kernels if kernel["shared"] > SHARED_MEMORY or kernel["complaints"]
             or kernel["stack"] and kernel["kernel"] not in SPILLS]
    assert not wrong, "\n".join(map(str, wrong))
