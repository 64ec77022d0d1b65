"""What an attention variant supports, and checks of configurations and devices against it."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attnzoo.attention.base import Attention

POSITIONS = ("learned", "rotary", "alibi", "none")


@dataclass(frozen=True)
class Supports:
    """What a variant supports. Anything else is refused when the layer is built. Only `packed`, `trees` and `cache` are checked later: at
    their first use, and `packed` and `trees` also before a run prepares its data.

    trees: `attend` respects `seq.parents`.
    context_parallel: the layouts that work with context parallelism. "dense": `attend` takes fewer queries than keys, and the queries
        belong to the last tokens, as with a cache; "packed": `attend` also respects `seq.cu_seqlens_k`, in all sequences unless
        `Attention.merges_chunks` is False.
    context_dropout: attention dropout works with context parallelism: `attend` respects `seq.dropout_state`.
    """

    causal: bool = True
    bidirectional: bool = True
    positions: tuple[str, ...] = POSITIONS
    packed: bool = True
    dropout: bool = True
    cache: bool = True
    trees: bool = False
    context_parallel: tuple[str, ...] = ()
    context_dropout: bool = False

    def common(self, other: "Supports") -> "Supports":
        """What both support."""
        return Supports(**{
            name: tuple(one for one in mine if one in getattr(other, name)) if isinstance(mine, tuple) else mine and getattr(other, name)
            for name, mine in vars(self).items()})


def check_context_parallel(layer: "Attention", packed: bool) -> None:
    """Raises ValueError where the layer does not work with context parallelism. packed: whether the sequences are packed."""
    spec = layer.spec
    kind, ways = ("packed" if packed else "dense"), layer.supports.context_parallel
    if kind not in ways:
        way_out = "set data.cross_documents=true" if spec.causal and "dense" in ways else "set trainer.context_parallel=1"
        raise ValueError(f"trainer.context_parallel: several devices cannot read {kind} sequences by attention={layer.name}; {way_out}, "
                         "or attention=flash")
    if spec.dropout > 0 and not layer.supports.context_dropout:
        raise ValueError(f"trainer.context_parallel: attention={layer.name} needs model.attention_dropout=0, got {spec.dropout}; set "
                         "it, or attention=flash")
    if spec.rope_scaling in ("dynamic", "longrope"):  # they depend on the longest position, which a device's own tokens do not show
        raise ValueError(f"trainer.context_parallel: model.rope_scaling={spec.rope_scaling} looks at the longest position")
    if not spec.causal and (spec.positions == "alibi" or layer.temperature is not None):
        what = "positions=alibi" if spec.positions == "alibi" else f"attention_temperature={layer.temperature.kind}"
        raise ValueError(f"trainer.context_parallel: does not go with model.{what} in a bidirectional model")


def check_path(impl: str | None, device: torch.device) -> None:
    """Raises ValueError for an implementation that cannot run on this device at all. This is known before any data are prepared."""
    if impl == "gluon" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)):
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(f"attention.impl=gluon: needs a Hopper GPU, got {found}; null takes the fastest path that runs")
    if impl == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"attention.impl=triton: needs a GPU, got {device.type}; null takes the fastest path that runs")
    if impl == "cpu" and device.type != "cpu":
        raise ValueError(f"attention.impl=cpu: needs a CPU, got {device.type}; null takes the fastest path that runs")
