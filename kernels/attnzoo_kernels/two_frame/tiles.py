"""The tile table of the Hopper forward: a pure function of widths. Plain kernels take flash's tiles."""

from attnzoo_kernels._gluon.forward_tile import ForwardTile


def hopper_forward_tile(block_d: int, block_dv: int) -> ForwardTile:
    """As flash's windows have: masks in the loop spill beside three consumers. The far frame's queries are loaded while the near one's are
    read."""
    return ForwardTile(128, 2 if max(block_d, block_dv) == 128 else 3, q_slots=2)
