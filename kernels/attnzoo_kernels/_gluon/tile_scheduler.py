"""The tile scheduler of the persistent forwards: the producer warp takes tiles of queries from a counter and publishes them to the
consumers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo_kernels._gluon.forward import ROWS, WORK, words_of
from attnzoo_kernels._gluon.hopper import await_empty, await_full, mbarrier, read_word, write_word
from attnzoo_kernels._gluon.tiles import both_bounds, by_groups, find_sequence, key_tiles, sequence_bounds


class Tile(NamedTuple):
    """A tile of queries of one head, as the producer warp knows it."""

    index: Any
    words: Any  # for the consumers: sequence, head, row
    sequence: Any
    head: Any
    row: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any
    own: Any  # the variant's own fields, here and in Taken and Span


class Taken(NamedTuple):
    """A tile of queries of one head, as a consumer knows it."""

    sequence: Any  # -1: there are no more tiles
    head: Any
    row: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any
    own: Any


class Span(NamedTuple):
    """A consumer's rows and the tiles of keys that it reads, at least one: end - 1 down to begin."""

    row: Any  # the first of its 64 rows
    len_q: Any
    len_k: Any
    loaded_begin: Any  # the tiles of keys that are loaded for all consumers
    loaded_end: Any
    begin: Any
    full_begin: Any  # tiles before this one, and from full_end on, need a mask
    full_end: Any
    end: Any
    own: Any


@gluon.jit
def next_index(problem):
    """The index of a program's next tile. Its first index is its program id, so the counter begins behind these."""
    return gl.atomic_add(problem.counter, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def decode_tile(index, problem, BLOCK: gl.constexpr, PACKED: gl.constexpr, LAST_FIRST: gl.constexpr):
    """(sequence, head, tile) of the index-th tile. The tiles of one head follow each other.

    LAST_FIRST: dense tiles run from the last to the first, and those of `head_group` heads, whose keys share L2, are interleaved.
    Under a causal mask the last tiles have the most work, so that short ones come at the end.
    """
    n_seqs, seqlen, heads, head_group = problem.n_seqs, problem.seqlen_q, problem.heads, problem.head_group
    if PACKED:
        slots = seqlen // BLOCK + n_seqs + 1
        head = index // slots
        slot = index % slots
        sequence = find_sequence(problem.cu_seqlens_q, slot, n_seqs, BLOCK)
        tile = slot - (gl.load(problem.cu_seqlens_q + sequence) // BLOCK + sequence)
    else:
        tiles = (seqlen + BLOCK - 1) // BLOCK
        if LAST_FIRST:
            owner, tile = by_groups(index, tiles, n_seqs * heads, head_group, False)
            tile = tiles - 1 - tile
        else:
            owner = index // tiles  # the head, counted over the heads of all sequences
            tile = index % tiles
        sequence = owner // heads
        head = owner % heads
    return sequence, head, tile


@gluon.jit
def _decode_queries(index, problem, BLOCK: gl.constexpr, config):
    """(sequence, head, tile) as decode_tile gives them, and the sequence's first query and number of queries."""
    sequence, head, tile = decode_tile(index, problem, BLOCK, config.PACKED, config.HAS_RIGHT)
    first_q, len_q = sequence_bounds(problem.cu_seqlens_q, sequence, problem.n_seqs, problem.seqlen_q, config.PACKED, True)
    return sequence, head, tile, first_q, len_q


@gluon.jit
def next_tile(index, program, config):
    """NEXT_TILE of dense and of packed sequences."""
    problem = program.problem
    BLOCK_M: gl.constexpr = config.CONSUMERS * ROWS
    sequence, head, tile, first_q, len_q = _decode_queries(index, problem, BLOCK_M, config)
    row = tile * BLOCK_M
    if config.PACKED:
        while (row >= len_q) & (index < problem.n_tiles):
            index = next_index(problem)
            sequence, head, tile, first_q, len_q = _decode_queries(index, problem, BLOCK_M, config)
            row = tile * BLOCK_M
        if config.HAS_RIGHT:  # the last tile of a sequence first: it sees most keys
            row = ((len_q + BLOCK_M - 1) // BLOCK_M - 1 - tile) * BLOCK_M
    first_k, len_k = sequence_bounds(problem.cu_seqlens_k, sequence, problem.n_seqs, problem.seqlen_k, config.PACKED, False)
    return Tile(index, (sequence, head, row), sequence, head, row, first_q, len_q, first_k, len_k, ())


@gluon.jit
def leave_at_zero(problem, index):
    """Resets the counter for the next kernel; called after a program's last tile. Each program takes exactly one index past the last tile,
    so the program that gets the highest of these is the last one that reads the counter."""
    if index == problem.n_tiles + gl.num_programs(0) - 1:
        gl.store(problem.counter, 0)


@gluon.jit
def publish(program, taken, words):
    """Publishes the next tile to the consumers; a sequence of -1 means that there is none. So only the producer warp decodes indices, which
    takes divisions."""
    slot = await_empty(program.bars.work_empty, taken, WORK)
    for word in gl.static_range(len(words)):
        write_word(program.tiles.work.index(word * WORK + slot), words[word])
    mbarrier.arrive(program.bars.work_full.index(slot), count=1)


@gluon.jit
def read_words(taken, program, config):
    """Waits until the next tile is published; returns its words."""
    slot = await_full(program.bars.work_full, taken, WORK)
    words = ()
    for word in gl.static_range(words_of(config)):
        words = words + (read_word(program.tiles.work.index(word * WORK + slot)),)
    mbarrier.arrive(program.bars.work_empty.index(slot), count=1)
    return words


@gluon.jit
def read_tile(taken, program, config):
    """READ_TILE of dense and of packed sequences. Its `own` holds the words after the first three."""
    words = read_words(taken, program, config)
    first_q, len_q, first_k, len_k = both_bounds(gl.maximum(words[0], 0), program.problem, config.PACKED)
    return Taken(words[0], words[1], words[2], first_q, len_q, first_k, len_k, words[3:])


@gluon.jit
def rows_of(ME: gl.constexpr, taken, config):
    """Which 64 rows of a tile a consumer has. Under HALF_TILE two consumers take turns with the first rows, which are less work: none of
    them sees the second half of their last tile of keys."""
    rows = ME
    if config.HALF_TILE and config.CONSUMERS == 2:
        rows = ME ^ (taken & 1)
    return rows


@gluon.jit
def loaded_tiles(tile, program, config):
    """LOADED_TILES of a causal mask, a window, or no mask."""
    problem = program.problem
    begin, _, _, end = key_tiles(tile.row, config.CONSUMERS * ROWS, tile.len_q, tile.len_k, problem.window_left, problem.window_right,
                                 config.BLOCK_N, config.HAS_LEFT, config.HAS_RIGHT)
    return begin, gl.maximum(end, begin + 1)


@gluon.jit
def span(tile, ME: gl.constexpr, taken, program, config):
    """SPAN of a causal mask, a window, or no mask."""
    problem, len_q, len_k = program.problem, tile.len_q, tile.len_k
    loaded_begin, loaded_end = config.LOADED_TILES(tile, program, config)
    row = tile.row + rows_of(ME, taken, config) * ROWS
    begin, full_begin, full_end, end = key_tiles(row, ROWS, len_q, len_k, problem.window_left, problem.window_right, config.BLOCK_N,
                                                 config.HAS_LEFT, config.HAS_RIGHT)
    begin = gl.where(row < len_q, gl.minimum(begin, loaded_end - 1), loaded_end - 1)
    end = gl.where(row < len_q, gl.maximum(end, begin + 1), loaded_end)
    if config.PREFETCH_TILE:  # release all unread tiles before the mainloop: the producer may need their slots to reach the next tile
        end = gl.where(row < len_q, end, loaded_begin + 1)
        begin = loaded_begin
    own = ()
    if config.SPAN_PARAMS is not None:
        own = config.SPAN_PARAMS(tile, row, program, config)
    return Span(row, len_q, len_k, loaded_begin, loaded_end, begin, full_begin, full_end, end, own)


_counters: dict[tuple[int, int], Tensor] = {}
_lock = threading.Lock()


def tile_counter(device: torch.device) -> Tensor:
    """The counter of a launch, int32 (1,), which is zero; each kernel leaves it at zero for the next one.

    There is one for each stream, because the kernels of a stream run one after the other. A captured graph may run beside them, so it gets
    its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    counter = _counters.get(key)
    if counter is None:
        # torch.compile warms up a graph with the graph's memory pool on this thread; in another thread the counter gets ordinary memory
        with _lock, ThreadPoolExecutor(1) as other_thread:
            counter, made = other_thread.submit(_new_counter, device).result()
            torch.cuda.current_stream(device).wait_event(made)
            _counters[key] = counter
    return counter


def _new_counter(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    with torch.cuda.device(device):
        return torch.zeros(1, dtype=torch.int32, device=device), torch.cuda.current_stream().record_event()
