"""Whether a model's logits are numbers. The likeliest of NaN logits is the first token, which reads like an answer."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from attnzoo.evaluation.results import Row


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Looks at everything that the model returns inside the block, also while it generates; gives a function that says what was wrong,
    "" for nothing.

    model: as Fabric placed it, or plain. The host waits for the device only when the function is called.
    """
    broken: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            broken.append(output.amax().isnan())  # NaN if one is, without a second tensor of that size

    def reason() -> str:
        n_broken = int(torch.stack(broken).sum()) if broken else 0
        return f"NaN logits in {n_broken} of {len(broken)} passes of the model, whose weights are finite" if n_broken else ""

    handle = getattr(model, "module", model).register_forward_hook(look)
    try:
        yield reason
    finally:
        handle.remove()


def mark_nan(rows: Sequence[Row], reason: str) -> list[Row]:
    """The rows of a measurement in which there were NaN logits: those that show it say why; if none does, none of them means anything."""
    shows = [row.value is not None and math.isnan(row.value) for row in rows]
    return [
        replace(row, value=math.nan, stderr=None, note=reason) if row.value is not None and (shown or not any(shows)) else row
        for row, shown in zip(rows, shows, strict=True)
    ]
