"""Several processes, one for each GPU, that evaluate together: `torchrun --nproc-per-node 4 eval.py ...`.

All processes do the same work, except that they share long sequences (attnzoo_kernels.context_parallel). Only the first one writes.
"""

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.logger import _flatten_dict
from torch import Tensor, nn

from attnzoo.batch import IGNORED
from attnzoo.training.record import versions

T = TypeVar("T")


def begin(accelerator: str, told: dict[str, Any]) -> None:
    """Joins the processes that torchrun started. Does nothing if there is only one.

    told: the command, without settings that depend on the machine. Raises ValueError in all processes if their commands or their versions
    differ.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched() or os.environ.get("WORLD_SIZE") == "1":
        return
    on_gpus = device_number(accelerator) is not None
    if on_gpus:
        torch.cuda.set_device(device_number(accelerator))
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(minutes=30))  # a wait may include compiling kernels
    if not is_first():
        logging.disable(logging.INFO)
    from attnzoo_kernels.context_parallel import check_alike

    check_alike(**_flatten_dict({**told, "versions": versions()}, delimiter="."))


def end() -> None:
    if ranks() > 1:
        dist.destroy_process_group()


def device_number(accelerator: str) -> int | None:
    """The number of this process's GPU; None if it uses the CPU."""
    return int(os.environ.get("LOCAL_RANK", 0)) if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available() else None


def ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    return ranks() == 1 or dist.get_rank() == 0


def of_first(value: T) -> T:
    """The first process's value, in all processes."""
    if ranks() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def check(model: nn.Module) -> None:
    """With several processes, raises ValueError for a model whose sequences they cannot read together."""
    for block in model.blocks if ranks() > 1 else ():
        block.attention.check_context_parallel(packed=False)


def losses(model: nn.Module, input_ids: Tensor, labels: Tensor, own_losses: Callable[..., Tensor]) -> Tensor:
    """The losses of all labels that are not IGNORED, flat (n,) and on the host, computed by all processes together.

    input_ids, labels: int64 (batch, length), on the host. own_losses: called as own_losses(model, input_ids, at, targets, **inputs) with a
    process's part of them; `at` is int64 (n,), the positions of the targets in the flattened input_ids. Rows that are too short to be
    divided are read by each process for itself.
    """
    inputs = {}
    device = next(model.parameters()).device
    own_ids, own_labels = input_ids, labels
    if ranks() > 1:
        from attnzoo_kernels.context_parallel import ContextParallel
        from attnzoo_kernels.context_placement import MULTIPLE

        if labels.shape[1] > 2 * ranks() * MULTIPLE:
            plan = ContextParallel(labels.shape[1])
            inputs, own_ids, own_labels = {"context": plan}, plan.shard(input_ids, 1), plan.shard(labels, 1, IGNORED)
    flat = own_labels.flatten()
    at = (flat != IGNORED).nonzero().squeeze(1)
    found = own_losses(model, own_ids.to(device), at.to(device), flat[at].to(device), **inputs)
    if not inputs:
        return found.cpu()
    whole = found.new_zeros(flat.shape).index_copy_(0, at.to(device), found)
    return plan.gather(whole.view(own_labels.shape), 1).cpu()[labels != IGNORED]
