"""Which sequence has which pages of a cache. Sequences with the same beginning share its pages (PagedAttention, Kwon et al. 2023,
arXiv:2309.06180)."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnzoo_kernels import checks


class OutOfBlocksError(RuntimeError):
    """The cache has too few free pages. The call that raised this changed nothing."""


@dataclass(eq=False)
class CachedSequence:
    """A sequence in the cache; `BlockAllocator` alone changes it.

    blocks: its pages, in order. length: its tokens. cached: how many of its first tokens were in the cache when it began.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    cached: int = 0
    freed: bool = False
    digest: bytes = b""  # of all tokens in full pages
    tail: list[int] = field(default_factory=list)  # tokens of the page that is not full


class BlockAllocator:
    """Gives pages to sequences, for `decode_attention(block_table=)`. Plain Python: it holds numbers of pages and touches no cache.

    A page's users are the sequences that have it. Full pages are never written again; they are found by a hash (SHA-256) of all tokens up
    to their end. A full page without users can be found until its room is needed; then the least recently used one is dropped first.

    The caller writes the keys and values of new tokens (after `begin`, those after `cached`) and, before that, makes the copies that
    `append` returns. A page counts as filled as soon as a call returns it, so it must be written before other sequences read it.

    n_blocks: pages of the cache. block_size: tokens of a page.
    """

    def __init__(self, n_blocks: int, block_size: int):
        checks.integer("n_blocks", n_blocks, 1)
        checks.integer("block_size", block_size, 1)
        self.block_size = block_size
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._users: Counter[int] = Counter()
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # findable pages without users, the least recently used first

    @property
    def n_free(self) -> int:
        """Pages that a sequence can still get."""
        return len(self._empty) + len(self._unused)

    def begin(self, tokens: Sequence[int]) -> CachedSequence:
        """A new sequence of these tokens, at least one. Its first `cached` tokens are in the cache already. These never include the last
        token, so that its logits are computed. Raises OutOfBlocksError."""
        tokens = _whole_numbers(tokens)
        if not tokens:
            raise ValueError("tokens: must have at least one token")
        new = CachedSequence()
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            digest = self._after(new.digest, tokens[start : start + self.block_size])
            block = self._by_digest.get(digest)
            if block is None:
                break
            self._use(block)
            new.blocks.append(block)
            new.digest = digest
        new.cached = new.length = len(new.blocks) * self.block_size
        try:
            self.append(new, tokens[new.length :])
        except OutOfBlocksError:
            self.free(new)
            raise
        return new

    def append(self, sequence: CachedSequence, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Room for further tokens: the pages to be copied first, as (from, to). Raises OutOfBlocksError.

        A page that is partly filled and has other users is copied for this sequence.
        """
        self._check(sequence)
        tokens = _whole_numbers(tokens)
        if not tokens:
            return []
        shared = bool(sequence.tail) and self._users[sequence.blocks[-1]] > 1
        needed = -(-(sequence.length + len(tokens)) // self.block_size) - len(sequence.blocks) + shared
        if needed > self.n_free:
            raise OutOfBlocksError(f"tokens: {len(tokens)} more need {needed} pages of {self.block_size}, and {self.n_free} are free")
        fresh = [self._take() for _ in range(needed)]
        copies = []
        if shared:
            copies = [(sequence.blocks[-1], fresh[0])]
            self._leave(sequence.blocks.pop())
        sequence.blocks += fresh
        block = sequence.length // self.block_size
        for token in tokens:
            sequence.tail.append(token)
            if len(sequence.tail) == self.block_size:
                sequence.digest = self._after(sequence.digest, sequence.tail)
                if sequence.digest not in self._by_digest:
                    self._by_digest[sequence.digest] = sequence.blocks[block]
                    self._digests[sequence.blocks[block]] = sequence.digest
                sequence.tail = []
                block += 1
        sequence.length += len(tokens)
        return copies

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """Another sequence of the same tokens in the same pages."""
        self._check(sequence)
        for block in sequence.blocks:
            self._use(block)
        return CachedSequence([*sequence.blocks], sequence.length, sequence.length, digest=sequence.digest, tail=[*sequence.tail])

    def free(self, sequence: CachedSequence) -> None:
        """The sequence needs its pages no more."""
        self._check(sequence)
        # the last page is the least recently used: others may still begin with those before it
        for block in reversed(sequence.blocks):
            self._leave(block)
        sequence.blocks, sequence.freed = [], True

    def table(self, sequences: Iterable[CachedSequence]) -> list[list[int]]:
        """Rows of a block_table, filled up with -1: `torch.tensor(table, dtype=torch.int32)`."""
        rows = []
        for sequence in sequences:
            self._check(sequence)
            rows.append(sequence.blocks)
        longest = max(map(len, rows), default=0)
        return [row + [-1] * (longest - len(row)) for row in rows]

    def _check(self, sequence: CachedSequence) -> None:
        if sequence.freed:
            raise ValueError("sequence: was freed")

    def _after(self, digest: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(digest + array("q", tokens).tobytes()).digest()

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            del self._by_digest[self._digests.pop(block)]
        self._users[block] = 1
        return block

    def _use(self, block: int) -> None:
        self._unused.pop(block, None)
        self._users[block] += 1

    def _leave(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._digests:
                self._unused[block] = None
            else:
                self._empty.append(block)


def _whole_numbers(tokens: Sequence[int]) -> array:
    try:
        return array("q", list(tokens))  # from bytes it would read eight as one number
    except (TypeError, OverflowError) as error:
        raise TypeError(f"tokens: must be whole numbers of 64 bits, got {tokens!r}") from error
