"""Tiles of the Hopper kernels and their lists (`attnzoo_kernels.block_sparse.lists`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def listed_tile(index, order, tiles, heads, n_tiles):
    """(batch, head, number) of the index-th tile. Indices past the last tile give the last one."""
    entry = gl.load(order + gl.minimum(index, n_tiles - 1))
    return entry // tiles // heads, entry // tiles % heads, entry % tiles


@gluon.jit
def list_lengths(count, number):
    """(a list's entries, those of them that need no mask). They must be read anew for each head. If a loop over heads carries them and they
    only bound its inner loops, Triton (3.6, 3.7) takes them for dead, and they keep their first value."""
    clear = gl.load(count + 2 * number)
    return clear + gl.load(count + 2 * number + 1), clear


@gluon.jit
def find_list(entries, number, width):
    return entries + number.to(gl.int64) * width
