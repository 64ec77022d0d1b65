"""The tile table of the Hopper forward: a pure function of widths. Plain kernels take flash's tiles."""

from attnzoo_kernels._gluon.forward_tile import ForwardTile

IN_TWO_LOOPS = False  # whether far keys past the border get a loop without masks; not measured yet


def hopper_forward_tile(block_d: int, block_dv: int, in_two_loops: bool) -> ForwardTile:
    """The tile of flash's windows, because masks in the loop and three consumers together would spill. In two loops, where few steps have
    masks, the tile of flash's long calls. The far frame's queries are loaded while the near frame's are read."""
    if max(block_d, block_dv) == 128:
        return ForwardTile(128, 2, q_slots=2)
    if in_two_loops:
        return ForwardTile(128, 4, 3, 160, q_slots=2, joint_release=True, k_before_pv=True)
    return ForwardTile(128, 3, q_slots=2)
