"""FlashAttention's tile tables: pure functions of widths, element size, architecture and mask kind.

Hopper's entries were measured on an H200 (`python -m benchmarks.tune`); docs/performance/flash.md has figures. The others
are the largest that compile without spills for sm_80 and fit the 99 KB of shared memory that every later card has. A dQ tile's rows divide
`_triton.backward.STATS_BLOCK`, and a dK/dV tile's rows divide the dQ tile's. Head dim 128 uses the loops, as the other widths do: Triton's
own warp specialisation was faster there, but works with Triton 3.6 only.
"""

from dataclasses import dataclass, replace

from attnzoo_kernels._gluon.forward_tile import ForwardTile


@dataclass(frozen=True)
class Tile:
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int
    tma: bool = False  # operands are loaded by TMA
    q_registers: bool = False  # forward: the queries are an operand in registers, not in shared memory
    one_loop: bool = False  # forward, dK/dV: masking is a branch in one loop; else masked tiles have loops of their own
    from_stats: bool = False  # dK/dV: the products' accumulators begin with minus the row statistics, which then need no registers
    q_select: bool = False  # forward: queries pass through a select instruction, with which ptxas orders the loop differently


def hopper_like(arch: int) -> bool:
    """Whether it is sm_90 to sm_103: these have TMA, and 227 KB of shared memory for a program."""
    return 90 <= arch < 110


INTERPRETER = Tile(32, 32, 4, 1)  # arch 0: nothing is measured there; small tiles reach every branch of the code


def forward_tile(arch: int, block_d: int, block_dv: int, itemsize: int, *, causal: bool, window: bool, packed: bool = False,
                 heavy: bool = False, long: bool = False) -> Tile:
    """heavy: softcap or dropout, which double the instructions for a score. long: dense sequences of more than 4096 keys."""
    width = max(block_d, block_dv)
    if arch == 0:
        return replace(INTERPRETER, one_loop=causal)
    if itemsize == 4:
        return Tile(32, 32, 8, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if hopper_like(arch):
        if width <= 64:
            # tiles of 128 keys are faster in long calls without a mask, which would need the registers
            if long and not (causal or window or heavy):
                return Tile(64, 128, 4, 2, tma=True)
            return Tile(64, 64, 4, 3, tma=True, q_registers=True)
        if width <= 128 and (causal or window or packed) and not heavy:
            # one loop is faster for calls with a mask, and slower without one and under softcap. q_registers is off for widths up to 64:
            # ptxas 12.8 gives the operand of P V the registers of the queries there
            return Tile(64, 64, 4, 3, tma=True, q_registers=min(block_d, block_dv) > 64, one_loop=True)
        if width <= 128:
            return Tile(64, 64, 4, 3, tma=True, q_registers=True, q_select=not heavy)  # the select gains 6 % in long calls
        return Tile(128, 64, 8, 2, tma=True, q_registers=True)
    if width <= 64:
        return Tile(64, 64, 4, 3)
    if width <= 128:
        return Tile(128, 32, 8, 3)
    return Tile(64, 64, 8, 1)


def dq_tile(arch: int, block_d: int, block_dv: int, itemsize: int) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return INTERPRETER
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 16, 8, 1) if width <= 128 else Tile(16, 16, 4, 1)
    if hopper_like(arch):
        if width <= 64:
            return Tile(64, 64, 4, 3, tma=True)  # 128 keys are faster in long calls without a mask, but lose more in short ones
        if width <= 128:
            return Tile(64, 64, 4, 3, tma=True)  # one_loop is faster in short causal calls, but loses more in long ones
        return Tile(64, 64, 8, 2, tma=True)
    if width <= 64:
        return Tile(64, 32, 4, 3)
    if width <= 128:
        return Tile(64, 64, 8, 2)
    return Tile(64, 32, 8, 1)


def dkdv_tile(arch: int, block_d: int, block_dv: int, itemsize: int, *, causal: bool, packed: bool = False, heavy: bool = False) -> Tile:
    width = max(block_d, block_dv)
    if arch == 0:
        return replace(INTERPRETER, from_stats=True)
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(16, 32, 8, 1) if width <= 128 else Tile(16, 16, 8, 1)
    if hopper_like(arch):
        if width <= 64:
            # from_stats is a seventh faster, and slower only for packed sequences without a causal mask
            return Tile(64, 64, 4, 3, tma=True, one_loop=True, from_stats=causal or not packed)
        if width <= 128:
            # packed causal sequences are faster with loops of their own for masks
            return Tile(64, 64, 4, 2, tma=True, one_loop=not (packed and causal or heavy), from_stats=packed and causal)
        return Tile(16, 32, 4, 2) if causal else Tile(32, 64, 8, 1, tma=True)
    if width <= 64:
        return Tile(64, 128, 8, 2)
    if width <= 128:
        return Tile(64, 64, 8, 2) if block_d == block_dv else Tile(64, 32, 8, 1)
    return Tile(32, 32, 8, 1)


FORWARD_LENGTHS = (512, 1024, 2048, 2**31 - 1)  # the last lengths before hopper_forward_tile may return another tile


def hopper_forward_tile(block_d: int, block_dv: int, seqlen_q: int, *, causal: bool, window: bool, packed: bool) -> ForwardTile:
    """The tile of a Hopper forward. seqlen_q: for packed sequences their mean length."""
    if block_d > 128:  # up to 192: two stages of keys and values, one place for queries and half an output fill shared memory
        not_negative = causal and not window and seqlen_q > 2048  # without a mask this would spill
        return ForwardTile(128, 2, prefetch_tile=causal and not window, row_max_not_negative=not_negative, part=64)
    if max(block_d, block_dv) == 128:
        # prefetch_tile gains 2 to 3 % in short causal calls; in long calls without a mask it would lose as much
        # row_max_not_negative gains up to 2 % in long calls, and loses in short ones
        not_negative = block_d == block_dv and not window and seqlen_q > (2048 if causal else 1024)
        return ForwardTile(128, 2, prefetch_tile=causal and not window, row_max_not_negative=not_negative)
    # the masked loop of a window spills at 160 registers, and 192 rows would leave a short sequence's last tile mostly empty
    if window or seqlen_q <= (2048 if packed else 1024 if causal else 512):
        return ForwardTile(128, 3, prefetch_tile=not window)
    return ForwardTile(128, 4, 3, 160, q_slots=2, joint_release=True, k_before_pv=True, prefetch_tile=True)


def takes_half_tile(tile: ForwardTile, block_d: int, block_dv: int, seqlen_q: int, mask_in_loop: bool) -> bool:
    """Whether a causal call skips half of a consumer's first tile of keys where no query sees it (HALF_TILE). At width 128 this is faster
    in short calls only, and with three consumers and masks in the loop it would spill."""
    return (block_d == block_dv == 64 or seqlen_q <= 512) and not (tile.consumers == 3 and mask_in_loop)


def hopper_range_tile(block_d: int, block_dv: int, *, window: bool) -> ForwardTile:
    """The tile of a Hopper forward over key ranges: at width 128, or with a window, that of short causal sequences; else that of long
    ones."""
    if window or max(block_d, block_dv) == 128:
        return ForwardTile(128, 2 if max(block_d, block_dv) == 128 else 3, prefetch_tile=not window)
    return ForwardTile(128, 4, 3, 160, q_slots=2, joint_release=True, k_before_pv=True, prefetch_tile=True)
