"""Seconds until a new process has its first results: `python -m benchmarks.first_call IMPL HEAD_DIM DEVICE` prints them as JSON."""

import json
import sys
import time


def main(impl: str, head_dim: int, device: str) -> dict[str, float]:
    import torch

    torch.zeros(1, device=device)  # the device's own start-up is not ours
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal clock
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[step] = time.perf_counter() - clock
        clock = time.perf_counter()

    from attnzoo_kernels import flash_attention
    from attnzoo_kernels.flash.cases import Case

    lap("import")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problem = {"heads": 4, "head_dim": head_dim, "causal": True, "dtype": dtype}
    for name, case in {"dense": Case(seqlen_q=512, **problem), "packed": Case(lengths_q=(512, 100), **problem)}.items():
        x = case.inputs(device)
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        lap("inputs")
        out = flash_attention(*leaves, impl=impl, **x.options)
        lap(f"{name} forward")
        out.backward(x.dout)
        lap(f"{name} backward")
    del seconds["inputs"]
    return seconds | {"all": sum(seconds.values())}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
