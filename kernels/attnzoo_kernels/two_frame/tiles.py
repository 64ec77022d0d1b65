"""The tile table of the Hopper forward: a pure function of its arguments. Plain kernels take flash's tiles."""

from attnzoo_kernels._gluon.forward_tile import ForwardTile

FEW = 128  # far keys, below which the Hopper forward has a single loop, and plain Triton's backward is faster (docs/performance)


def hopper_forward_tile(block_d: int, block_dv: int, in_two_loops: bool) -> ForwardTile:
    """in_two_loops: far keys that need no mask have a loop of their own, and the tile is that of flash's long calls. A single loop has
    masks, with which three consumers would spill, and takes the tile of flash's windows. The far frame's queries are loaded while the
    near frame's are read."""
    if max(block_d, block_dv) == 128:
        return ForwardTile(128, 2, q_slots=2)
    if in_two_loops:
        return ForwardTile(128, 4, 3, 160, q_slots=2, joint_release=True, k_before_pv=True)
    return ForwardTile(128, 3, q_slots=2)
