"""Pages of a cache against caches of one piece: random programs, and what is shared, copied and forgotten."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo_kernels import decode_attention
from attnzoo_kernels.decode.blocks import BlockAllocator, OutOfBlocksError

UNWRITTEN = -1
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=7)
operations = st.one_of(
    st.tuples(st.just("begin"), st.just(0), tokens), st.tuples(st.just("append"), st.integers(0, 9), tokens),
    st.tuples(st.just("fork"), st.integers(0, 9), st.none()), st.tuples(st.just("free"), st.integers(0, 9), st.none()),
    st.tuples(st.just("beams"), st.integers(0, 9), st.lists(st.integers(0, 9), min_size=2, max_size=3)))


def content(seen):
    """What a cache holds of the last of these tokens: it depends on all before it."""
    return hash(tuple(seen)) & 0xFFFFFFFF


class Program:
    """Sequences by an allocator and a cache in pages, and beside them as plain lists."""

    def __init__(self, n_blocks, block_size):
        self.blocks, self.n_blocks, self.size = BlockAllocator(n_blocks, block_size), n_blocks, block_size
        self.cache = [[UNWRITTEN] * block_size for _ in range(n_blocks)]
        self.live = []  # (sequence, its tokens)

    def write(self, sequence, seen, start):
        for i in range(start, len(seen)):
            self.cache[sequence.blocks[i // self.size]][i % self.size] = content(seen[: i + 1])

    def run(self, name, which, given):
        if name == "begin":
            before = self.state()
            try:
                sequence = self.blocks.begin(given)
            except OutOfBlocksError:
                assert self.state() == before
                return
            assert sequence.cached < sequence.length == len(given)
            self.write(sequence, given, sequence.cached)
            self.live.append((sequence, given))
        elif self.live:
            at = which % len(self.live)
            sequence, seen = self.live[at]
            if name == "append":
                self.append(at, given)
            elif name == "fork":
                self.live.append((self.blocks.fork(sequence), seen))
            elif name == "free":
                self.blocks.free(sequence)
                del self.live[at]
            else:  # of all beams those that `given` says go on, the others end
                kept = [self.live[i % len(self.live)] for i in given]
                forks = [(self.blocks.fork(s), t) for s, t in kept]
                for old, _ in self.live:
                    self.blocks.free(old)
                self.live = forks

    def append(self, at, given):
        sequence, seen = self.live[at]
        before = self.state()
        try:
            copies = self.blocks.append(sequence, given)
        except OutOfBlocksError:
            assert self.state() == before
            return
        for source, target in copies:
            self.cache[target] = list(self.cache[source])
        self.live[at] = sequence, seen + given
        self.write(sequence, seen + given, len(seen))

    def state(self):
        return self.blocks.n_free, [(list(s.blocks), s.length, list(s.tail), s.digest) for s, _ in self.live]

    def check(self):
        used = set()
        for sequence, seen in self.live:
            assert sequence.length == len(seen) and len(sequence.blocks) == -(-len(seen) // self.size)
            held = [x for block in sequence.blocks for x in self.cache[block]][: len(seen)]
            assert held == [content(seen[: i + 1]) for i in range(len(seen))]
            used |= set(sequence.blocks)
        assert self.blocks.n_free == self.n_blocks - len(used)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(2, 12), st.lists(operations, max_size=25))
def test_random_programs_hold_what_plain_lists_hold(block_size, n_blocks, program):
    state = Program(n_blocks, block_size)
    for operation in program:
        state.run(*operation)
        state.check()
    for sequence, _ in state.live:
        state.blocks.free(sequence)
    assert state.blocks.n_free == n_blocks


def test_attention_over_the_pages_is_that_over_rows_bit_by_bit():
    program = Program(12, 4)
    for operation in (("begin", 0, [1, 0, 1, 1, 0, 1]), ("fork", 0, None), ("append", 0, [0, 0, 1]), ("append", 1, [1]),
                      ("begin", 0, [1, 0, 1, 1, 0, 0, 0])):
        program.run(*operation)
    vectors = torch.Generator()

    def vector(x):
        return torch.randn(2, 1, 8, generator=vectors.manual_seed(x))  # a key and a value

    sequences, texts = zip(*program.live, strict=True)
    nothing = torch.full((2, 1, 8), torch.nan)
    pages = torch.stack([torch.stack([nothing if x == UNWRITTEN else vector(x) for x in page]) for page in program.cache]).unbind(2)
    rows = torch.full((3, 9, 2, 1, 8), torch.nan)
    for b, text in enumerate(texts):
        rows[b, : len(text)] = torch.stack([vector(content(text[: i + 1])) for i in range(len(text))])
    lengths, q = torch.tensor([s.length for s in sequences], dtype=torch.int32), torch.randn(3, 1, 2, 8)
    table = torch.tensor(program.blocks.table(sequences), dtype=torch.int32)
    assert len({row[0] for row in table.tolist()}) == 1  # all three share their first page
    for impl in ("triton", "reference") if not torch.cuda.is_available() else ("reference",):
        found = decode_attention(q, *pages, cache_seqlens=lengths, block_table=table, impl=impl)
        assert torch.equal(found, decode_attention(q, *rows.unbind(2), cache_seqlens=lengths, impl=impl))


def test_full_pages_are_found_again_until_their_room_is_needed():
    blocks = BlockAllocator(4, 2)
    first = blocks.begin([1, 2, 3, 4, 5])
    second = blocks.begin([1, 2, 3, 4])
    assert first.cached == 0 and second.cached == 2 and second.blocks[0] == first.blocks[0]  # the last token is computed always
    assert blocks.n_free == 0
    blocks.free(first)
    blocks.free(second)
    assert blocks.n_free == 4
    other = blocks.begin([7, 7, 7, 7])
    assert set(other.blocks).isdisjoint(first.blocks) and other.cached == 0
    blocks.free(other)
    again = blocks.begin([1, 2, 3, 4, 9])
    assert again.cached == 4
    blocks.free(again)
    assert blocks.begin([8] * 8).cached == 0  # all four pages
    with pytest.raises(OutOfBlocksError, match="tokens: 1 more need 1 pages of 2, and 0 are free"):
        blocks.begin([1])


def test_the_least_recently_used_page_goes_first():
    blocks = BlockAllocator(3, 1)
    for token in (1, 2, 3):
        blocks.free(blocks.begin([token]))
    for text, cached in (([1, 5], 1), ([3, 9], 1), ([2, 9], 0)):  # the first one takes the room of 2, not of 3
        sequence = blocks.begin(text)
        assert sequence.cached == cached
        blocks.free(sequence)
    # of a sequence's own pages its last one
    blocks = BlockAllocator(3, 1)
    blocks.free(blocks.begin([1, 2, 3]))
    blocks.free(blocks.begin([4]))
    assert blocks.begin([1, 2, 9]).cached == 2


def test_a_partly_filled_page_is_copied_once_and_by_who_writes():
    blocks = BlockAllocator(5, 4)
    first = blocks.begin([1, 2, 3])
    second, third = blocks.fork(first), blocks.fork(first)
    (page,) = first.blocks
    assert blocks.append(second, [4]) == [(page, second.blocks[0])] and second.blocks != [page]
    assert blocks.append(third, [5, 6]) == [(page, third.blocks[0])] and len(third.blocks) == 2
    assert blocks.append(first, [7]) == [] and first.blocks == [page]
    assert blocks.append(first, []) == [] and blocks.table([first, third]) == [[page, -1], third.blocks]


@pytest.mark.parametrize("of", (bytes, torch.tensor, tuple))
def test_tokens_are_whole_numbers_of_any_sequence(of):
    blocks = BlockAllocator(8, 8)
    blocks.begin(list(range(20)))
    assert blocks.begin(of(range(20))).cached == 16


@pytest.mark.parametrize("wrong", ([1, 2.5], "ab", [2**63], 3, None), ids=str)
def test_what_is_no_token_changes_nothing(wrong):
    blocks = BlockAllocator(8, 2)
    sequence = blocks.begin([1])
    for call in (blocks.begin, lambda tokens: blocks.append(sequence, tokens)):
        with pytest.raises(TypeError, match="tokens: must be whole numbers of 64 bits, got"):
            call(wrong)
    assert blocks.n_free == 7 and sequence.tail == [1] and len(sequence.blocks) == 1


def test_wrong_calls_are_refused():
    blocks = BlockAllocator(2, 2)
    sequence = blocks.begin([1])
    blocks.free(sequence)
    for call in (lambda: blocks.free(sequence), lambda: blocks.append(sequence, [1]), lambda: blocks.fork(sequence),
                 lambda: blocks.table([sequence])):
        with pytest.raises(ValueError, match="sequence: was freed"):
            call()
    with pytest.raises(ValueError, match="tokens: must have at least one"):
        blocks.begin([])
    with pytest.raises(ValueError, match="block_size"):
        BlockAllocator(2, 0)
