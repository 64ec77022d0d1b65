"""Tiles of the Hopper kernels and their lists (`attnzoo_kernels.block_sparse.lists`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def listed_tile(index, order, tiles, heads, n_tiles):
    """(batch, head, number) of the index-th tile; from the last one on the same."""
    entry = gl.load(order + gl.minimum(index, n_tiles - 1))
    return entry // tiles // heads, entry // tiles % heads, entry % tiles


@gluon.jit
def list_lengths(count, number):
    """A list's entries, and those of them that need no mask. To be read anew for each head: lengths that a loop over heads carries and
    that only bound its inner loops are taken for dead by Triton (3.6, 3.7) and keep their first value."""
    clear = gl.load(count + 2 * number)
    return clear + gl.load(count + 2 * number + 1), clear


@gluon.jit
def find_list(entries, number, width):
    return entries + number.to(gl.int64) * width
