"""Checks for NaN logits. The argmax of NaN logits is a token like any other, so without a check it would pass as an answer."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from attnzoo.evaluation.results import Row


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Checks every output of the model inside the block for NaN, also while it generates. Yields a function that describes the NaN logits
    found so far, "" if none.

    model: plain, or wrapped by Fabric. The host waits for the device only when the yielded function is called.
    """
    broken: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            broken.append(output.amax().isnan())  # amax is NaN if any element is, and needs no second tensor of that size

    def reason() -> str:
        n_broken = int(torch.stack(broken).sum()) if broken else 0
        return f"NaN logits in {n_broken} of {len(broken)} passes of the model, whose weights are finite" if n_broken else ""

    handle = getattr(model, "module", model).register_forward_hook(look)
    try:
        yield reason
    finally:
        handle.remove()


def mark_nan(rows: Sequence[Row], reason: str) -> list[Row]:
    """The rows of a measurement with NaN logits, with `reason` as the note of each row that is NaN. If no row is NaN, all become NaN."""
    shows = [row.value is not None and math.isnan(row.value) for row in rows]
    return [
        replace(row, value=math.nan, stderr=None, note=reason) if row.value is not None and (shown or not any(shows)) else row
        for row, shown in zip(rows, shows, strict=True)
    ]
