"""Which of several devices holds which tokens of a sequence that they read together (`context_parallel`), and which keys these see.

The tokens of one global order (a packed stream, or the rows of a dense batch) are cut into equal chunks, equally many for each of R ranks.
By default rank r holds chunks r and 2R - 1 - r of 2R, so that all ranks have equally many causal pairs of one sequence ("zigzag", Zhu 2024,
github.com/zhuzilin/ring-flash-attention). The pairs of packed documents are not divided equally by that: `deal` gives out the chunks by
the pairs that they have.

Documents need no divisibility. What is missing in the last chunks is padding, which no token sees and whose outputs mean nothing.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo_kernels import checks

Range = tuple[int, int]  # the first token, and the end
Owned = tuple[tuple[int, ...], ...]  # by rank its chunks
MULTIPLE = 128  # chunks begin at multiples of this, so that tiles of queries begin where they begin on one device


class Part(NamedTuple):
    """One of a rank's chunks, as queries, and the keys that they may see; or all of its chunks, merged (`Placement.parts`).

    index: its number among the rank's parts. begin: its first token in the global order. queries: number of its tokens.
    keys: (first, end) of the keys in the global order; None if merged: then those of each chunk lie one after the other, but neighbouring
        chunks are one.
    lengths: for packed sequences the operators' arguments cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k; else empty. Those of a
        chunk contain every sequence of the stream, in its place. Sequences before the chunk have keys but no queries, those after it have
        neither. Merged ones contain the sequences of each chunk, one chunk after the other.
    of_ranks: the keys of all chunks of every rank, of neighbouring chunks together if merged.
    head_group, head_groups: the number of this group of heads, and how many equal groups there are (`ContextParallel.attend`).
    """

    index: int
    begin: int
    queries: int
    keys: Range | None
    lengths: dict[str, Any]
    of_ranks: Sequence[Sequence[Range]]
    head_group: int = 0
    head_groups: int = 1

    def own_heads(self, x: Tensor, dim: int = 0) -> Tensor:
        """The part of x, which has all heads along a dimension (such as sinks or slopes), that belongs to this group's heads; a view."""
        if x.shape[dim] % self.head_groups:
            raise ValueError(f"x: dimension {dim} must be divisible by the {self.head_groups} groups of heads, got shape {tuple(x.shape)}")
        heads = x.shape[dim] // self.head_groups
        return x.narrow(dim, self.head_group * heads, heads)


class Placement:
    """Which rank holds which tokens.

    total: tokens of the global order. ranks, rank: how many there are, and which one this is.
    chunk: tokens of a chunk, by default as many as hold `total`, rounded up to a multiple of 128.
    owned: for each rank the increasing numbers of its chunks, equally many for each; by default the zigzag's two.
    documents: lengths of the packed sequences, on the host. A part's keys then begin with the document of its first query; else with
        the first token. Tokens behind the last document belong to none.
    """

    def __init__(self, total: int, ranks: int, rank: int, chunk: int | None = None, owned: Sequence[Sequence[int]] | None = None,
                 documents: Sequence[int] | None = None):
        checks.integer("total", total, 1)
        checks.integer("ranks", ranks, 1)
        checks.integer("rank", rank, 0)
        if rank >= ranks:
            raise ValueError(f"rank: must be below the {ranks} ranks, got {rank}")
        self.owned = zigzag(ranks) if owned is None else _checked_owned(owned, ranks)
        self.total, self.ranks, self.rank = total, ranks, rank
        self.chunks = self.owned[rank]
        self.chunk = _chunk(total, ranks, len(self.chunks), chunk)
        # each chunk's position in the order of the ranks
        self.places = sorted(range(ranks * len(self.chunks)), key=list(itertools.chain(*self.owned)).__getitem__)
        self._bounds = None if documents is None else [0, *itertools.accumulate(_checked_documents(documents, total))]

    @property
    def local(self) -> int:
        """Tokens of a rank, with padding."""
        return len(self.chunks) * self.chunk

    def shard(self, x: Tensor, dim: int, fill: float = 0) -> Tensor:
        """The rank's own part of x along its dimension `dim`, `total` long: its chunks, with `fill` behind the last token."""
        if x.shape[dim] != self.total:
            raise ValueError(f"x: dimension {dim} must be the {self.total} tokens of the global order, got shape {tuple(x.shape)}")
        pieces = []
        for chunk in self.chunks:
            begin = min(chunk * self.chunk, self.total)
            piece = x.narrow(dim, begin, min(self.chunk, self.total - begin))
            if missing := self.chunk - piece.shape[dim]:
                shape = list(x.shape)
                shape[dim] = missing
                piece = torch.cat([piece, x.new_full(shape, fill)], dim)
            pieces.append(piece)
        return torch.cat(pieces, dim)

    def parts(self, *, causal: bool, window: int = -1, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
              merge: bool = False) -> tuple[Part, ...]:
        """The rank's chunks, or one part of all of them.

        causal: queries of a chunk are the last ones of the keys up to the chunk's end, so that masks aligned to the bottom right are the
            whole sequence's. Otherwise all keys are seen, and no mask may depend on positions.
        window: how many keys before its own a causal query sees at most; -1 is unlimited. Keys before these are not gathered.
        cu_seqlens, max_seqlen: of the whole packed stream, as the operators take them; None if dense. The host waits for nothing.
        merge: make one part of all chunks, for one packed call, where `documents` are given and the keys of a rank's chunks are fewer than
            all. cu_seqlens must begin with the bounds of the documents. It is for operators in which any sequence may have fewer queries
            than keys, and whose results do not depend on a sequence's number, as a dropout mask does.
        """
        _check_window("window", window, causal)
        if merge and cu_seqlens is not None and self._bounds is not None:
            runs = [_runs(chunks, self.chunk) for chunks in self.owned]
            of_ranks = tuple(tuple(self._keys(*run, causal, window) for run in own) for own in runs)
            if not self.gathers_all(of_ranks):
                lengths = self._merged_lengths(runs[self.rank], of_ranks[self.rank], cu_seqlens, max_seqlen)
                return (Part(0, runs[self.rank][0][0], self.local, None, lengths, of_ranks),)
        of_ranks = tuple(tuple(self._keys(chunk * self.chunk, (chunk + 1) * self.chunk, causal, window) for chunk in chunks)
                         for chunks in self.owned)
        parts = []
        for index, keys in enumerate(of_ranks[self.rank]):
            begin = self.chunks[index] * self.chunk
            lengths = {} if cu_seqlens is None else self._lengths(begin, keys, cu_seqlens, max_seqlen)
            parts.append(Part(index, begin, self.chunk, keys, lengths, of_ranks))
        return tuple(parts)

    def gathers_all(self, of_ranks: Sequence[Sequence[Range]]) -> bool:
        """Whether each rank fetches all tokens; else it fetches its ranges only, because these are fewer. of_ranks: by rank."""
        most = max(sum(end - first for first, end in ranges) for ranges in of_ranks)
        return most >= self.ranks * self.local or not any(first for ranges in of_ranks for first, _ in ranges)

    def _keys(self, begin: int, end: int, causal: bool, window: int) -> Range:
        """The keys that these queries see, their own among them."""
        first, last = (0, self.total) if self._bounds is None else self._documents_of(begin, end)
        if causal:
            first, last = max(first, begin - window if window >= 0 else 0), end
        # rounded down, so that tiles of keys begin where they begin without a window, and addresses stay multiples of 16 bytes
        step = math.gcd(self.chunk, MULTIPLE)
        return first // step * step, last

    def _documents_of(self, begin: int, end: int) -> Range:
        """Where the documents of these tokens begin and end; a token that belongs to none is its own."""
        bounds = self._bounds
        first = bounds[bisect.bisect_right(bounds, begin) - 1] if begin < bounds[-1] else begin
        return first, bounds[bisect.bisect_left(bounds, end)] if end <= bounds[-1] else end

    def _lengths(self, begin: int, keys: Range, cu_seqlens: Tensor, max_seqlen: int | None) -> dict[str, Any]:
        first, end = keys
        return {
            "cu_seqlens_q": (cu_seqlens - begin).clamp(0, self.chunk),
            "cu_seqlens_k": (cu_seqlens - first).clamp(0, end - first),
            "max_seqlen_q": None if max_seqlen is None else min(max_seqlen, self.chunk),
            "max_seqlen_k": None if max_seqlen is None else min(max_seqlen, end - first)}

    def _merged_lengths(self, runs: Sequence[Range], ranges: Sequence[Range], cu_seqlens: Tensor,
                        max_seqlen: int | None) -> dict[str, Any]:
        """`lengths` of all chunks. Those behind the last document add no sequence, so that padding stays behind all sequences."""
        bounds = self._bounds
        if cu_seqlens.shape[0] < len(bounds) or cu_seqlens.is_cpu and cu_seqlens[: len(bounds)].tolist() != bounds:
            raise ValueError(f"cu_seqlens: must begin with the bounds {bounds} of the documents, got {cu_seqlens.tolist()}")
        empty = cu_seqlens.new_zeros(2)  # a sequence, because a rank may have padding only
        queries, keys, place_q, place_k = [empty], [empty], 0, 0
        for (begin, stop), (first, end) in zip(runs, ranges, strict=True):
            # from the sequence of the first key to that of the last query
            bounds_here = cu_seqlens[bisect.bisect_right(bounds, first) : bisect.bisect_left(bounds, stop) + 1]
            if begin < bounds[-1]:
                queries.append(_within(bounds_here, begin, stop - begin, place_q))
                keys.append(_within(bounds_here, first, end - first, place_k))
            place_q, place_k = place_q + stop - begin, place_k + end - first
        longest_q, longest_k = (max(end - first for first, end in of) for of in (runs, ranges))
        return {
            "cu_seqlens_q": torch.cat(queries), "cu_seqlens_k": torch.cat(keys),
            "max_seqlen_q": None if max_seqlen is None else min(max_seqlen, longest_q),
            "max_seqlen_k": None if max_seqlen is None else min(max_seqlen, longest_k)}


def _runs(chunks: Sequence[int], size: int) -> list[Range]:
    """The tokens of chunks; neighbours are one range."""
    runs: list[Range] = []
    for chunk in chunks:
        begin = runs.pop()[0] if runs and runs[-1][1] == chunk * size else chunk * size
        runs.append((begin, (chunk + 1) * size))
    return runs


def _within(bounds: Tensor, first: int, length: int, place: int) -> Tensor:
    """Bounds of sequences within the tokens from `first` on, which lie at `place`."""
    return (bounds - (first - place)).clamp(place, place + length)


def zigzag(ranks: int) -> Owned:
    """Chunks r and 2R - 1 - r for rank r of R."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def deal(total: int, documents: Sequence[int], ranks: int, *, causal: bool = True, windows: Sequence[int] = (-1,),
         chunks: int | None = None, chunk: int | None = None) -> Owned:
    """Chunks for each rank so that all have about equally many pairs of a query and a key that it sees: `owned` of a `Placement`.

    The chunk with the most pairs goes first, each to the rank that has the least so far and still has room. It is plain Python on the host,
    and gives the same on all ranks.

    total, chunk: as in `Placement`. documents: lengths of the packed sequences, on the host. causal: else each token sees its document.
    windows: of causal layers, as in `Placement.parts`, one for each; their pairs are added up.
    chunks: of a rank. By default the placement whose largest rank has the fewest pairs, of the zigzag and of 2 and 4 dealt chunks; 4 only
        where that pads the tokens by at most a 32nd more.
    """
    checks.integer("total", total, 1)
    checks.integer("ranks", ranks, 1)
    documents = _checked_documents(documents, total)
    if not windows:
        raise ValueError(f"windows: must name one for each layer, got {windows}")
    for window in windows:
        _check_window("windows", window, causal)
    if chunks is not None:
        checks.integer("chunks", chunks, 1)
        return _greedy(_pairs(documents, _chunk(total, ranks, chunks, chunk), chunks * ranks, causal, windows), ranks)[0]
    halves, quarters = (_chunk(total, ranks, n, chunk) for n in (2, 4))
    pairs = _pairs(documents, halves, 2 * ranks, causal, windows)
    found = [(zigzag(ranks), max(sum(pairs[i] for i in own) for own in zigzag(ranks))), _greedy(pairs, ranks)]
    if 4 * quarters * 32 <= 2 * halves * 33:
        found.append(_greedy(_pairs(documents, quarters, 4 * ranks, causal, windows), ranks))
    return min(found, key=lambda placed: placed[1])[0]  # the first of equal ones


def visible_pairs(documents: Sequence[int], chunk: int, n: int, *, causal: bool = True, window: int = -1) -> list[int]:
    """Of n chunks of packed sequences: the pairs of each chunk's queries and the keys that they see."""
    pairs, begin = [0] * n, 0
    for length in documents:
        end = begin + length
        for i in range(begin // chunk, -(-end // chunk)):
            low, high = max(begin, i * chunk) - begin, min(end, (i + 1) * chunk) - begin
            pairs[i] += _causal_pairs(high, window) - _causal_pairs(low, window) if causal else (high - low) * length
        begin = end
    return pairs


def _causal_pairs(tokens: int, window: int) -> int:
    """Of a document's first tokens."""
    growing = tokens if window < 0 else min(tokens, window + 1)
    return growing * (growing + 1) // 2 + (tokens - growing) * (window + 1)


def _pairs(documents: list[int], chunk: int, n: int, causal: bool, windows: Sequence[int]) -> list[int]:
    """`visible_pairs` of all layers."""
    of_windows = [[layers * pairs for pairs in visible_pairs(documents, chunk, n, causal=causal, window=window)]
                  for window, layers in Counter(windows).items()]
    return [sum(pairs) for pairs in zip(*of_windows, strict=True)]


def _greedy(pairs: list[int], ranks: int) -> tuple[Owned, int]:
    """Which rank has which chunks, and the pairs of the rank that has the most."""
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for chunk in sorted(range(len(pairs)), key=lambda chunk: -pairs[chunk]):
        rank = min((rank for rank in range(ranks) if len(owned[rank]) < len(pairs) // ranks), key=loads.__getitem__)
        owned[rank].append(chunk)
        loads[rank] += pairs[chunk]
    return tuple(tuple(sorted(own)) for own in owned), max(loads)


def _chunk(total: int, ranks: int, chunks: int, chunk: int | None) -> int:
    """Tokens of a chunk, where each rank has `chunks` of them."""
    if chunk is None:
        return -(-total // (chunks * ranks * MULTIPLE)) * MULTIPLE
    checks.integer("chunk", chunk, 1)
    if chunks * ranks * chunk < total:
        raise ValueError(f"chunk: {chunks} x {ranks} ranks of {chunk} tokens must hold the {total} tokens")
    return chunk


def _check_window(name: str, window: int, causal: bool) -> None:
    checks.integer(name, window, -1)
    if window >= 0 and not causal:
        raise ValueError(f"{name}: must be -1 without causal, got {window}")


def _checked_owned(owned: Sequence[Sequence[int]], ranks: int) -> Owned:
    found = tuple(map(tuple, owned))
    each = len(found[0]) if found else 0
    increasing = all(len(own) == each and list(own) == sorted(own) for own in found)
    if len(found) != ranks or not each or not increasing or sorted(itertools.chain(*found)) != list(range(each * ranks)):
        raise ValueError(f"owned: must name equally many chunks for each of {ranks} ranks, increasing, and each chunk once, got {found}")
    return found


def _checked_documents(documents: Sequence[int], total: int) -> list[int]:
    if isinstance(documents, Tensor):
        raise TypeError("documents: must be integers on the host, got a tensor (reading it would wait for the device)")
    found = list(map(int, documents))
    if min(found, default=0) < 0 or sum(found) > total:
        raise ValueError(f"documents: must be lengths of at least 0 that add up to at most the {total} tokens, got {sum(found)} in "
                         f"{len(found)} of at least {min(found, default=0)}")
    return found
