"""`flash_attention_fp8` against the bfloat16 forward and FlashAttention-3's FP8, and what FP8 costs in accuracy.

    python -m benchmarks.flash_fp8                          # the main table: inputs are quantised beforehand
    python -m benchmarks.flash_fp8 speed quantized accuracy
"""

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnzoo_kernels import flash_attention, flash_attention_fp8, quantize_fp8
from attnzoo_kernels.flash.cases import Case, Inputs, benchmark_case
from attnzoo_kernels.flash_fp8 import BLOCK, Fp8Inputs
from attnzoo_kernels.flash_fp8.cases import with_outliers
from attnzoo_kernels.flash_fp8.reference import flash_fp8_reference
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.flash import EXACT_IN_DOUBLE, Check, main_cases
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported
from benchmarks.peers import PEER_LIMIT, fa3, fa3_missing
from benchmarks.report import Row

SCALES: dict[str, dict] = {"by head": {}, "by block": {"block": BLOCK}, "by head, rotated": {"hadamard": True},
                           "by block, rotated": {"block": BLOCK, "hadamard": True}}


def only_forward(forward: Callable[[], Tensor]) -> Pass:
    def backward() -> tuple[Tensor, ...]:
        raise Unsupported("FP8 attention has no gradient")

    return Pass(forward, backward, [])


def impl_for(x: Inputs) -> str | None:
    return "gluon" if x.q.is_cuda else None


def fp8(scales: dict, impl: str | None = None) -> Callable[[Case, Inputs], Pass]:
    """The attention alone."""

    def make(case: Case, x: Inputs) -> Pass:
        inputs = quantize_fp8(x.q, x.k, x.v, **scales)._asdict()
        return only_forward(lambda: flash_attention_fp8(**inputs, causal=case.causal, out_dtype=case.dtype, impl=impl or impl_for(x)))

    return make


def from_bfloat16(scales: dict) -> Callable[[Case, Inputs], Pass]:
    """With quantisation in the time."""

    def make(case: Case, x: Inputs) -> Pass:
        return only_forward(lambda: flash_attention_fp8(**quantize_fp8(x.q, x.k, x.v, **scales)._asdict(), causal=case.causal,
                                                        out_dtype=case.dtype, impl=impl_for(x)))

    return make


def bfloat16(case: Case, x: Inputs) -> Pass:
    return only_forward(lambda: flash_attention(x.q, x.k, x.v, **x.options, impl=impl_for(x)))


def fa3_fp8(case: Case, x: Inputs) -> Pass:
    """Values lie column by column, as its own users have them; it transposes them in the kernel."""
    inputs = quantize_fp8(x.q, x.k, x.v)._asdict()
    inputs["v"] = inputs["v"].contiguous()
    return only_forward(lambda: torch.ops.flash_attn_3.fwd(**inputs, is_causal=case.causal)[0])


def tensor_cores(q: Tensor, k: Tensor) -> Tensor:
    """Eager's product of e4m3 (batch, heads, rows, width) and (batch, heads, columns, width), which rounds as the hardware does."""
    columns, width = k.shape[-2:]
    q = torch.nn.functional.pad(q.float(), (0, -width % 16)).to(q.dtype)
    k = torch.nn.functional.pad(k.float(), (0, -width % 16, 0, -columns % 16)).to(k.dtype)
    one = torch.ones((), device=q.device)
    return torch.stack([torch.stack([
        torch._scaled_mm(a.contiguous(), b.contiguous().mT, scale_a=one, scale_b=one, out_dtype=torch.float32)[:, :columns]
        for a, b in zip(*heads, strict=True)]) for heads in zip(q, k, strict=True)])


class FromQuantized:
    """A pass against the maths of its own quantised inputs, on the first and the last sequence and key head."""

    def __init__(self, case: Case, x: Inputs, scales: dict):
        self.case, self.scales, self.x = case, scales, x
        self.expected: list[tuple[Tensor, Tensor]] = []

    def __call__(self, run: Pass) -> float:
        out = run.restore(run.forward())
        places = [(0, 0), (self.case.batch - 1, self.x.k.shape[2] - 1)]
        group = self.x.q.shape[2] // self.x.k.shape[2]
        if not self.expected:
            inputs = quantize_fp8(self.x.q, self.x.k, self.x.v, **self.scales)
            self.expected = [self.reference(inputs, group, *place) for place in places]
        return max(error_ratio(out[b : b + 1, :, h * group : (h + 1) * group], *expected)
                   for (b, h), expected in zip(places, self.expected, strict=True))

    def reference(self, inputs: Fp8Inputs, group: int, b: int, h: int) -> tuple[Tensor, Tensor]:
        """(eager, exact) of one key head."""
        cut = {name: x[b : b + 1, h : h + 1].contiguous() if name.endswith("descale")
               else x[b : b + 1, :, h * group : (h + 1) * group] if name == "q" else x[b : b + 1, :, h : h + 1]
               for name, x in inputs._asdict().items()}
        options = cut | {"causal": self.case.causal, "softmax_scale": self.x.q.shape[-1] ** -0.5}
        double = group * cut["q"].shape[1] * cut["k"].shape[1] <= EXACT_IN_DOUBLE
        exact = flash_fp8_reference(**options, dtype=torch.float64 if double else torch.float32)[0]
        product = tensor_cores if cut["q"].is_cuda else None
        return flash_fp8_reference(**options, product=product)[0].to(self.case.dtype), exact


FP8_SCALES = {"attnzoo-fp8": {}, "attnzoo-fp8-block": SCALES["by block"], "fa3-fp8": {},
              "attnzoo-reference": {}} | {
    f"quantize, {name}": scales for name, scales in SCALES.items()}
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-fp8", fp8({})),
        Backend("attnzoo-reference", fp8({}, "reference")),
        Backend("attnzoo-fp8-block", fp8(SCALES["by block"])),
        Backend("attnzoo-bf16", bfloat16),
        Backend("fa3-fp8", fa3_fp8, fa3_missing, limit=PEER_LIMIT),
        Backend("fa3-bf16", fa3, fa3_missing, limit=PEER_LIMIT),
    )
}
WITH_QUANTIZING = [Backend(f"quantize, {name}", from_bfloat16(scales)) for name, scales in SCALES.items()]


def entries(session: Session, case: Case, backends: list[Backend]) -> list[Entry]:
    x = case.inputs(session.device)
    return [Entry(b.name, b, case, x, {"forward": case.flops()},
                  FromQuantized(case, x, FP8_SCALES[b.name]) if b.name in FP8_SCALES else Check(case, x, ["forward"]))
            for b in backends]


def compared(session: Session, table: str, backends: list[Backend]) -> Iterator[list[Row]]:
    for panel, length, case in main_cases(session):
        yield harness.compare(Line("flash_fp8", table, panel, length), entries(session, case, backends), ["forward"], session.timing)


def speed(session: Session) -> Iterator[list[Row]]:
    """By length, head dim and mask; inputs are quantised beforehand."""
    yield from compared(session, "speed", session.backends)


def quantized(session: Session) -> Iterator[list[Row]]:
    """The same from bfloat16 inputs, with quantisation in the time."""
    plain = [b for b in session.backends if b.name in ("attnzoo-bf16", "attnzoo-fp8")]
    yield from compared(session, "quantized", WITH_QUANTIZING + plain)


def accuracy(session: Session) -> Iterator[list[Row]]:
    """Root mean square error against float64 of what was not quantised, relative to that of the result: standard normal inputs, and such
    with outliers."""
    o = session.options
    for head_dim in o.head_dims:
        length = min(o.lengths[-1], 4096)
        case = benchmark_case(length, head_dim, False, length, 4 * head_dim, dtype=session.dtype)
        for panel, x in (("normal", case.inputs(session.device)), ("outliers", with_outliers(case.inputs(session.device)))):
            exact = flash_attention(*(t.double() for t in x[:3]), impl="reference")
            results = {"bf16": bfloat16(case, x).forward(), "eager bf16": flash_attention(*x[:3], impl="reference")}
            results |= {f"fp8, {name}": fp8(scales)(case, x).forward() for name, scales in SCALES.items()}
            place = {"operator": "flash_fp8", "table": "accuracy", "panel": f"d{head_dim} {panel}", "x": length, "case": str(case),
                     "direction": "forward", "unit": "relative RMSE", "baseline": "bf16"}
            errors = {name: ((out.double() - exact).square().mean() / exact.square().mean()).sqrt().item() for name, out in results.items()}
            yield [Row(label=name, value=error, ratio=error / errors["bf16"], **place) for name, error in errors.items()]


TABLES = {f.__name__: f for f in (speed, quantized, accuracy)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("flash_fp8", list(TABLES), list(BACKENDS))
    harness.add_sizes(command, [512, 2048, 8192, 16384])
    command.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[32, 64], head_dims=[16], tokens=128, hidden=64)
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], {"speed": "sequence length"}, arguments)


if __name__ == "__main__":
    sys.exit(main())
