"""What a variant says of itself."""

from dataclasses import dataclass

POSITIONS = ("learned", "rotary", "alibi", "none")


@dataclass(frozen=True)
class Supports:
    """What a variant can do. A pairing outside of it is refused when the layer is built (`packed`, `trees`, `cache`: when first used;
    packed data and trees before they are prepared).

    trees: `attend` looks at `seq.parents`.
    context_parallel: sequences that several devices may read together. "dense": `attend` takes fewer queries than keys, the last ones, as
        with a cache; "packed": it also looks at `seq.cu_seqlens_k`.
    """

    causal: bool = True
    bidirectional: bool = True
    positions: tuple[str, ...] = POSITIONS
    packed: bool = True
    dropout: bool = True
    cache: bool = True
    trees: bool = False
    context_parallel: tuple[str, ...] = ()

    def common(self, other: "Supports") -> "Supports":
        """What both can do."""
        return Supports(**{
            name: tuple(one for one in mine if one in getattr(other, name)) if isinstance(mine, tuple) else mine and getattr(other, name)
            for name, mine in vars(self).items()})
