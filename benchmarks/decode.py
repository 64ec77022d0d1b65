"""`decode_attention` against its peers: TB/s of the keys and values read, held against the copy that each row of the CSV names.

    python -m benchmarks.decode                       # the main table: batches and lengths, 32 heads over 8, head dim 128
    python -m benchmarks.decode call layouts pages shared fp8 lengths queries

A model reads one cache after the other. So the main table replays a CUDA graph of calls on as many caches as hold 2 GB, the copy's size:
what the launches cost counts, what the host costs does not, and nothing is left of a cache when it is read again. The other tables time one
call at a time behind do_bench's flush, which leaves the L2 cache full of its own zeros: the call's reads push out 50 MB of them.

    python -m benchmarks.decode latents               # latent_decode_attention at DeepSeek-V2's widths, beside plain PyTorch and a copy
    python -m benchmarks.decode variants              # a new token in layers of differential, dual_chunk and block_sparse, beside flash
    python -m benchmarks.decode tiles group_tiles fp8_tiles latent_tiles   # candidates for the table in attnzoo_kernels/decode/tiles.py
"""

import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnzoo.attention.base import Attention, AttentionSpec
from attnzoo.attention.block_sparse import BlockSparseAttention
from attnzoo.attention.cache import KVCache, Newest
from attnzoo.attention.differential import DifferentialAttention
from attnzoo.attention.dual_chunk import DualChunkAttention
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.mla import attend_latents
from attnzoo.attention.sequence import SequenceInfo
from attnzoo_kernels import decode_attention, latent_decode_attention
from attnzoo_kernels.decode.cases import Case, Inputs, LatentCase, LatentInputs, benchmark_case
from attnzoo_kernels.decode.tiles import Tile
from attnzoo_kernels.flash.cases import mixed_lengths
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Session, Unsupported
from benchmarks.peers import PEER_LIMIT, compiled_flex_attention, fa3_missing, heads_first, sglang_missing
from benchmarks.report import Row

TRAFFIC = 2**31  # bytes of keys and values that a graph reads
MOST_LAYERS, MOST_CACHES = 32, 2**34  # layers, and bytes of their caches, of the table variants


def only_forward(forward: Callable[[], Tensor], **options) -> Pass:
    def backward() -> tuple[Tensor, ...]:
        raise Unsupported("decoding has no gradient")

    return Pass(forward, backward, [], **options)


def attnzoo(impl: str, **options) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        return only_forward(lambda: decode_attention(*x[:3], **x.options, impl=impl, **options))

    return make


def refuse_unlike_lengths(case: Case) -> None:
    if len(set(case.lengths)) > 1 or case.max_len not in (None, case.lengths[0]):
        raise Unsupported("cannot do: lengths on the device")


def sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        refuse_unlike_lengths(case)
        if case.seqlen_q > 1:
            raise Unsupported("cannot do: causal with unlike lengths")
        q, k, v = map(heads_first, x[:3])

        def forward() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return only_forward(forward, restore=lambda y: y.transpose(1, 2), scope=lambda: sdpa_kernel(backend))

    return make


def flex(case: Case, x: Inputs) -> Pass:
    refuse_unlike_lengths(case)
    if case.seqlen_q > 1:
        raise Unsupported("its mask is not written here")
    q, k, v = map(heads_first, x[:3])
    attend = functools.partial(compiled_flex_attention(), enable_gqa=q.shape[1] != k.shape[1])
    return only_forward(lambda: attend(q, k, v), restore=lambda y: y.transpose(1, 2))


def fa3_call(case: Case, x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Tensors and options: FlashAttention-3 takes the lengths and the pages from the device, as ours does, and chooses its splits."""
    options = {"seqused_k": x.options["cache_seqlens"], "is_causal": case.causal, "num_splits": 0, "pack_gqa": True}
    if "block_table" in x.options:
        options["page_table"] = x.options["block_table"].clamp(min=0)
    return tuple(t.nan_to_num(0.0) for t in x[:3]), options


def fa3(case: Case, x: Inputs) -> Pass:
    tensors, options = fa3_call(case, x)
    return only_forward(lambda: torch.ops.flash_attn_3.fwd(*tensors, **options)[0])


def sglang(case: Case, x: Inputs) -> Pass:
    """The same kernels in SGLang's build, whose operator has no defaults."""
    tensors, options = fa3_call(case, x)
    operator = torch.ops.sgl_kernel.fwd.default
    defaults = {argument.name: None for argument in operator._schema.arguments[3:]} | {
        "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0, "is_rotary_interleaved": False,
        "sm_margin": 0, "only_qv": False}
    return only_forward(lambda: operator(*tensors, **defaults | options)[0])


def captured(make: Callable[[Case, Inputs], Pass], inputs: list[Inputs]) -> Callable[[Case, Inputs], Pass]:
    """A call on each of `inputs` in one CUDA graph; on a CPU one after the other."""

    def made(case: Case, _: Inputs) -> Pass:
        passes = [make(case, x) for x in inputs]

        def call() -> Tensor:
            return [run.forward() for run in passes][0]

        with passes[0].scope():
            return only_forward(harness.replayed(call) if inputs[0].q.is_cuda else call, restore=passes[0].restore)

    return made


def check(case: Case, x: Inputs) -> Callable[[Pass], float]:
    """The first and the last sequence and key head against the reference."""
    group = case.heads // case.kv_heads
    slices = [(0, 0), (case.batch - 1, case.kv_heads - 1)]

    @functools.cache
    def reference(at: tuple[int, int], dtype: torch.dtype) -> Tensor:
        row, heads, head = slice(at[0], at[0] + 1), slice(at[1] * group, (at[1] + 1) * group), slice(at[1], at[1] + 1)
        parts = {"cache_seqlens": row, "block_table": row, "k_scale": head, "v_scale": head}
        options = {name: value[parts[name]] if name in parts else value for name, value in x.options.items()}
        rows = slice(None) if "block_table" in options else row
        tensors = (t[at, :, h].to(dtype) for t, at, h in zip(x[:3], (row, rows, rows), (heads, head, head), strict=True))
        return decode_attention(*tensors, **options, impl="reference")

    def share(run: Pass) -> float:
        out = run.restore(run.forward())
        return max(
            error_ratio(out[b : b + 1, :, h * group : (h + 1) * group], reference((b, h), x.q.dtype), reference((b, h), torch.float64))
            for b, h in slices)

    return share


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("attnzoo-triton", attnzoo("triton")),
        Backend("sdpa-cudnn", sdpa(SDPBackend.CUDNN_ATTENTION), limit=PEER_LIMIT),
        Backend("sdpa-fa2", sdpa(SDPBackend.FLASH_ATTENTION), limit=PEER_LIMIT),
        Backend("flex", flex, limit=PEER_LIMIT),
        Backend("fa3", fa3, fa3_missing, limit=PEER_LIMIT),
        # of the table of pages, where it is not yet measured
        Backend("fa3-pages", fa3, fa3_missing, limit=PEER_LIMIT, on_request=True),
        Backend("sglang-fa3", sglang, sglang_missing, limit=PEER_LIMIT, on_request=True),
        Backend("attnzoo-reference", attnzoo("reference")),
    )
}


def entries(session: Session, case: Case) -> list[Entry]:
    x = case.inputs(session.device)
    checked = check(case, x)
    return [Entry(b.name, b, case, x, {"forward": case.bytes()}, checked) for b in session.backends]


def compared(session: Session, table: str, cases: dict[tuple[str, int], Case], columns: Callable = entries) -> Iterator[list[Row]]:
    for (panel, x), case in cases.items():
        case = replace(case, dtype=session.dtype)
        yield harness.compare(Line("decode", table, panel, x), columns(session, case), ["forward"], session.timing, unit="TB/s")


def layers(session: Session, case: Case) -> list[Entry]:
    count = 2 if session.options.dry_run else max(2, TRAFFIC // case.bytes())
    inputs = [case.inputs(session.device, seed) for seed in range(count)]
    checked = check(case, inputs[0])
    return [Entry(b.name, replace(b, make=captured(b.make, inputs)), case, inputs[0], {"forward": count * case.bytes()}, checked)
            for b in session.backends]


def shape(session: Session, batch: int, length: int) -> tuple[int, int]:
    return (min(batch, 2), min(length, 64)) if session.options.dry_run else (batch, length)


def sizes(session: Session) -> dict[tuple[str, int], Case]:
    chosen = [(1, 65536), (64, 4096), (1, 4096), (1, 16384), (1, 262144), (16, 4096), (64, 1024), (16, 16384)]
    return {(f"batch {batch}", length): benchmark_case(batch, length) for batch, length in (shape(session, *size) for size in chosen)}


def speed(session: Session) -> Iterator[list[Row]]:
    """One query a sequence, full caches, one cache after the other."""
    yield from compared(session, "speed", sizes(session), layers)


def call(session: Session) -> Iterator[list[Row]]:
    """The same, one call at a time."""
    yield from compared(session, "call", sizes(session))


def layouts(session: Session) -> Iterator[list[Row]]:
    """The same bytes in other shapes: cache by heads first, other head dims and groups."""
    batch, length = shape(session, 1, 65536)
    case = benchmark_case(batch, length)
    cases = {
        "heads first": replace(case, heads_first=True), "head dim 64": replace(case, head_dim=64, kv_heads=16),
        "head dim 256": replace(case, head_dim=256, kv_heads=4, heads=16), "no groups": replace(case, heads=8),
        "group 8": replace(case, heads=64),
        "group 16": replace(case, heads=32, kv_heads=2), "multi-query": replace(case, kv_heads=1),
    }
    yield from compared(session, "layouts", {(panel, length): case for panel, case in cases.items()})


def pages(session: Session) -> Iterator[list[Row]]:
    """A cache in pages, beside one that lies in rows (0): one cache after the other."""
    with_pages = replace(session, backends=[b for b in session.backends if b.name.startswith(("attnzoo", "fa3-pages", "sglang-fa3"))])
    sizes = [shape(session, *size) for size in ((1, 65536), (64, 4096))]
    cases = {(f"batch {batch} of {length}", page): benchmark_case(batch, length, page=page or None)
             for batch, length in sizes for page in (0, 16, 64, 256)}
    yield from compared(with_pages, "pages", cases, layers)


def sharing(session: Session, batch: int, prefix: int, own: int) -> tuple[Case, Inputs, Callable[[Pass], float]]:
    """A case whose sequences begin with the same pages, and its check."""
    batch, prefix, own = (min(batch, 3), prefix // 128, own // 128) if session.options.dry_run else (batch, prefix, own)
    case = benchmark_case(batch, prefix + own, page=16, dtype=session.dtype)
    x = case.inputs(session.device)
    table = x.options["block_table"]
    table[:, : prefix // 16] = table[:1, : prefix // 16]
    return case, x, check(case, x)


def shared(session: Session) -> Iterator[list[Row]]:
    """Sequences that begin with the same pages, read for each or once: one call in a CUDA graph. Bytes are those of all sequences."""
    for batch, prefix, own in ((64, 8192, 512), (16, 8192, 512), (64, 0, 4096), (1, 0, 65536)):
        case, x, checked = sharing(session, batch, prefix, own)
        columns = [Entry(name, Backend(name, make), case, x, {"forward": case.bytes()}, checked) for name, make in (
            ("read for each", captured(attnzoo("triton"), [x])), ("read once", functools.partial(read_once, None)))]
        line = Line("decode", "shared", f"batch {batch}, {prefix} shared", prefix + own)
        yield harness.compare(line, columns, ["forward"], session.timing, unit="TB/s")


def fp8(session: Session) -> Iterator[list[Row]]:
    """The same numbers of keys in 16 and in 8 bits, one cache after the other: calls a second."""
    for batch, length in ((64, 4096), (1, 65536)):
        for page in (None, 16):
            case = benchmark_case(*shape(session, batch, length), page=page, dtype=session.dtype)
            columns = []
            for name, narrow in ((session.options.dtype, case), ("float8_e4m3fn", replace(case, fp8=True))):
                entry, = layers(replace(session, backends=[BACKENDS["attnzoo-triton"]]), narrow)
                columns.append(replace(entry, label=name, work={"forward": entry.work["forward"] / narrow.bytes() * 1e12}))
            yield harness.compare(Line("decode", "fp8", f"batch {batch}" + (f", pages of {page}" if page else ""), length), columns,
                                  ["forward"], session.timing, unit="calls/s")


def lengths(session: Session) -> Iterator[list[Row]]:
    """Sequences of unlike lengths, and a cache with room for more than is in it."""
    batch, length = shape(session, 64, 4096)
    cases = {
        "mixed": benchmark_case(batch, length, lengths=mixed_lengths(2 * length, batch)),
        "one long": benchmark_case(batch, length, lengths=(16 * length, *[length // 8] * (batch - 1))),
        "half empty": benchmark_case(batch, length, max_len=2 * length),
    }
    yield from compared(session, "lengths", {(panel, length): case for panel, case in cases.items()})


def queries(session: Session) -> Iterator[list[Row]]:
    """Several queries a sequence, as in speculative decoding; the bytes stay the same."""
    batch, length = shape(session, 1, 65536)
    yield from compared(session, "queries", {("batch 1", m): benchmark_case(batch, length, seqlen_q=m) for m in (1, 2, 4, 8, 16)})


def tiles(session: Session) -> Iterator[list[Row]]:
    """Candidates by tile; the first column is the table's."""
    candidates = [Tile(16, *shape) for shape in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4), (1, 2, 3, 4), (False, True))]
    # half a kilobyte a key: at least 32 KB in flight on a multiprocessor, at most its shared memory
    candidates = [t for t in candidates if t.block_n * (t.num_stages - 1) * t.programs >= 64
                  and t.block_n * t.num_stages * t.programs <= 400]
    for batch, length in ((1, 65536), (64, 4096)):
        batch, length = shape(session, batch, length)
        case = benchmark_case(batch, length, dtype=session.dtype)
        x = case.inputs(session.device)
        columns = [
            Entry("table" if tile is None else "{1}x{0} {2} warps {3} stages {4} programs tma={5}".format(*vars(tile).values()),
                  Backend("attnzoo-triton", with_tile(tile)), case, x, {"forward": case.bytes()}, check(case, x))
            for tile in (None, *candidates[: 2 if session.options.dry_run else None])]
        yield harness.compare(Line("decode", "tiles", f"batch {batch}", length), columns, ["forward"], session.timing, unit="TB/s")


GROUP_TILES = tuple(Tile(*shape) for shape in (
    (64, 64, 4, 3, 2), (64, 64, 4, 2, 2), (64, 64, 4, 2, 3), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (64, 64, 8, 4, 1), (128, 64, 8, 3, 1),
    (128, 128, 8, 2, 1)))
BYTE_TILES = (Tile(16, 64, 4, 5, 2), Tile(16, 128, 8, 5, 1), *(Tile(16, *shape, pairs=True) for shape in (
    (64, 4, 3, 2), (64, 4, 4, 3), (64, 4, 5, 2), (64, 2, 4, 4), (128, 4, 3, 2), (128, 8, 3, 1), (128, 8, 5, 1), (128, 4, 5, 1),
    (256, 8, 3, 1))))


def tile_name(tile: Tile | None) -> str:
    if tile is None:
        return "table"
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages} p{tile.programs}" + " pairs" * tile.pairs


def read_once(tile: Tile | None, case: Case, x: Inputs) -> Pass:
    """A call that shares prefixes, captured; tile: of a group's queries."""
    from attnzoo_kernels.decode import prefixes

    rows = prefixes.shared_rows if tile is None else lambda *_: tile.block_m
    with patch.object(prefixes, "shared_rows", rows):
        return captured(with_tile(tile, rows=33, share_prefixes=True), [x])(case, x)


def group_tiles(session: Session) -> Iterator[list[Row]]:
    """Candidates for the tile of a group's queries; the first column is without sharing, the second what is taken."""
    for batch, prefix, own in ((64, 8192, 512), (16, 8192, 512)):
        case, x, checked = sharing(session, batch, prefix, own)

        columns = [Entry(name, Backend(name, make), case, x, {"forward": case.bytes()}, checked) for name, make in (
            ("read for each", captured(attnzoo("triton"), [x])),
            *((tile_name(tile), functools.partial(read_once, tile))
              for tile in (None, *GROUP_TILES[: 2 if session.options.dry_run else None])))]
        yield harness.compare(Line("decode", "group_tiles", f"batch {batch}, {prefix} shared", prefix + own), columns, ["forward"],
                              session.timing, unit="TB/s")


def fp8_tiles(session: Session) -> Iterator[list[Row]]:
    """Candidates for caches of 8 bits; the first column is 16 bits."""
    for page in (None, 16):
        for batch, length in ((64, 4096), (1, 65536)):
            case = benchmark_case(*shape(session, batch, length), page=page, dtype=session.dtype)
            first, = layers(replace(session, backends=[BACKENDS["attnzoo-triton"]]), case)
            narrow = replace(case, fp8=True)
            count = 2 if session.options.dry_run else max(2, TRAFFIC // narrow.bytes())
            inputs = [narrow.inputs(session.device, seed) for seed in range(count)]
            checked = check(narrow, inputs[0])
            columns = [replace(first, label=session.options.dtype, work={"forward": first.work["forward"] / case.bytes() * 1e12})]
            for tile in (None, *BYTE_TILES[: 2 if session.options.dry_run else None]):
                name = tile_name(tile)
                columns.append(Entry(name, Backend(name, captured(with_tile(tile), inputs)), narrow, inputs[0],
                                     {"forward": count * 1e12}, checked))
            yield harness.compare(Line("decode", "fp8_tiles", f"batch {batch}" + (f", pages of {page}" if page else ""), length), columns,
                                  ["forward"], session.timing, unit="calls/s")
            del first, inputs, checked, columns


def latent_kernel(case: LatentCase, x: LatentInputs, tile: Tile | None = None) -> Pass:
    from attnzoo_kernels.decode import latent as kernels

    plans = kernels._plan if tile is None else functools.cache(kernels._plan.__wrapped__)

    def forward() -> Tensor:
        with patch.object(kernels, "_plan", plans), patch.object(kernels, "latent_tile", lambda *_: tile) if tile else nullcontext():
            return latent_decode_attention(*x[:2], **x.options, impl="triton")

    return only_forward(forward)


def latent_torch(case: LatentCase, x: LatentInputs) -> Pass:
    """What attention=mla takes without a kernel."""
    return only_forward(lambda: attend_latents(*x[:2], case.value_dim, x.options["cache_seqlens"], case.head_dim**-0.5))


def latent_copy(case: LatentCase, x: LatentInputs) -> Pass:
    """A copy of half the cache, which reads and writes as many bytes as the cache has."""
    source = x.cache.flatten()[: x.cache.numel() // 2]
    target = torch.empty_like(source)
    return only_forward(lambda: target.copy_(source))


def latent_check(case: LatentCase, x: LatentInputs) -> Callable[[Pass], float]:
    """The first head of the first sequence and the last one of the last against the reference."""
    def reference(b: int, h: int, dtype: torch.dtype) -> Tensor:
        lengths = x.options["cache_seqlens"][b : b + 1]
        tensors = x.q[b : b + 1, :, h : h + 1].to(dtype), x.cache[b : b + 1].to(dtype)
        return latent_decode_attention(*tensors, **x.options | {"cache_seqlens": lengths}, impl="reference")

    @functools.cache
    def expected() -> list[tuple[int, int, Tensor, Tensor]]:
        corners = (0, 0), (case.batch - 1, case.heads - 1)
        return [(b, h, reference(b, h, x.q.dtype), reference(b, h, torch.float64)) for b, h in corners]

    def share(run: Pass) -> float:
        out = run.forward()
        if out.dim() == 1:  # the copy
            return 0.0
        return max(error_ratio(out[b : b + 1, :, h : h + 1], *both) for b, h, *both in expected())

    return share


def compared_latents(session: Session, table: str, sizes: list[tuple[int, int, int]], columns: dict[str, Callable]) -> Iterator[list[Row]]:
    """A call on each of as many caches as 2 GB hold, in one CUDA graph: TB/s of the caches' bytes, and microseconds of a call."""
    for heads, batch, length in sizes:
        case = LatentCase(lengths=(length,) * batch, heads=heads, dtype=session.dtype)
        count = 2 if session.options.dry_run else max(2, TRAFFIC // case.bytes())
        inputs = [case.inputs(session.device, seed) for seed in range(count)]
        checked = latent_check(case, inputs[0])
        entries = [Entry(name, Backend(name, captured(make, inputs), limit=PEER_LIMIT if name == "pytorch" else 1.0), case, inputs[0],
                         {"forward": count * case.bytes()}, checked) for name, make in columns.items()]
        line = Line("decode", table, f"{heads} heads, batch {batch}, {case.bytes() / 1e6:.4g} MB", length)
        rows = harness.compare(line, entries, ["forward"], session.timing, unit="TB/s")
        yield rows
        yield [replace(row, unit="us", value=row.ms and row.ms / count * 1e3) for row in rows]
        del inputs, checked, entries


def latents(session: Session) -> Iterator[list[Row]]:
    """One query a sequence over a cache of latents; the copy's ratio is the share of its bandwidth."""
    sizes = list(itertools.product((16, 128), (1, 16, 128), (4096, 32768)))
    if session.options.dry_run:
        sizes = [(16, 2, 64)]
    columns = {"attnzoo-triton": latent_kernel, "copy": latent_copy, "pytorch": latent_torch}
    yield from compared_latents(session, "latents", sizes, columns)


LATENT_TILES = (Tile(16, 64, 8, 3, 1),
                *(Tile(*shape, tma=True) for shape in ((16, 64, 8, 3, 1), (16, 64, 4, 3, 1), (16, 32, 8, 6, 1), (16, 32, 4, 6, 1),
                                                       (16, 32, 4, 3, 2), (32, 64, 8, 3, 1), (64, 64, 8, 2, 1))))


def latent_tiles(session: Session) -> Iterator[list[Row]]:
    """Candidates by tile; the first column is the table's."""
    sizes = [(2, 2, 64)] if session.options.dry_run else [(16, 1, 32768), (16, 64, 4096), (128, 1, 32768), (128, 64, 4096)]
    names = {f"{tile_name(tile)}{' tma' * tile.tma}": functools.partial(latent_kernel, tile=tile)
             for tile in LATENT_TILES[: 2 if session.options.dry_run else None]}
    yield from compared_latents(session, "latent_tiles", sizes, {"table": latent_kernel} | names)


Caches = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (batch, tokens, heads, head_dim)


def new_token(layer: Attention, projected: list[Tensor], caches: Caches) -> Callable[[], Tensor]:
    """What a model computes between the projections of its layers for one new token of each row, which is the last one of the caches. All
    layers are `layer` and have the same `projected` queries, keys and values. Returns the first layer's output."""
    shapes, (batch, tokens) = layer.head_shapes(), caches[0][0].shape[:2]
    held = [KVCache(batch, tokens) for _ in caches]
    for cache, buffers in zip(held, caches, strict=True):
        cache.buffers = tuple(x.view(batch, tokens, *shapes[name]) for x, name in zip(buffers, "kv", strict=True))
        cache.rotated = True  # any keys are random
    positions = torch.full((batch,), tokens - 1, device=caches[0][0].device)
    with torch.no_grad():
        layer.prepare_to_decode()

    @torch.no_grad()
    def call() -> Tensor:
        newest, seq, outs = Newest(positions, tokens), SequenceInfo(positions[:, None]), []
        for cache in held:
            cache.newest = newest
            q, k, v, *rest = projected
            q = layer.temper(layer._append_newest(q, k, v, cache, seq, *rest), seq)
            outs.append(layer.finish(layer.attend_newest(q, cache, seq, *rest)))
        return outs[0]

    return call


def variant_entry(label: str, layer: Attention, case: Case, caches: Caches, dtype: torch.dtype) -> Entry:
    """A column: `layer` over the caches. Its first and last row are held against decode_attention's reference."""
    device, batch = caches[0][0].device, case.batch
    generator = torch.Generator(device).manual_seed(1)
    layer = layer.to(device).eval()
    x = 2 * torch.randn(batch, 1, layer.spec.dim, generator=generator, device=device)
    with torch.no_grad():
        parts = layer.project(x)
    projected = [part.to(dtype) if n < 3 else part for n, part in enumerate(parts)]

    def make(*_) -> Pass:
        call = new_token(layer, projected, caches)
        return only_forward(harness.replayed(call) if device.type == "cuda" else call)

    @functools.cache
    def reference(row: int, dtype: torch.dtype) -> Tensor:
        plain, one = copy.deepcopy(layer), slice(row, row + 1)
        plain.impl = "reference"
        if dtype == torch.float64:
            plain.double()
        cache = tuple(t[one].to(dtype, copy=True) for t in caches[0])
        return new_token(plain, [part[one].to(dtype if n < 3 else part.dtype) for n, part in enumerate(projected)], [cache])()

    def check(run: Pass) -> float:
        out = run.forward()
        return max(error_ratio(out[row : row + 1], reference(row, dtype), reference(row, torch.float64)) for row in (0, batch - 1))

    return Entry(label, Backend(label, make), case, None, {"forward": len(caches) * case.bytes()}, check)


def variant_layers(tokens: int) -> Iterator[tuple[str, Attention, int]]:
    """Columns of the table variants: a name, a layer, and how many keys of a row its new token reads."""
    spec = AttentionSpec(dim=64, n_heads=32, n_kv_heads=8, head_dim=128, layer=1, n_layers=2, causal=True, positions="rotary",
                         train_context=tokens)
    yield "flash", FlashAttention(spec), tokens
    for version in (1, 2):
        yield f"differential V{version}", DifferentialAttention(spec, version=version), tokens
    for chunk_size in (4096, 1024):
        yield f"dual_chunk {chunk_size}", DualChunkAttention(spec, chunk_size=chunk_size), tokens
    for part in (4, 16):
        layer = BlockSparseAttention(spec, pattern={"name": "longformer", "window": tokens // part // 64, "n_global": 1}, block=64)
        keys = 64 * int(layer.pattern.layout(tokens).mask[0, 0, -1].sum())
        yield f"block_sparse 1/{part}", layer, keys
        yield f"flash, a window of 1/{part}", FlashAttention(spec, window_size=(keys - 1, 0)), keys


def variants(session: Session) -> Iterator[list[Row]]:
    """One new token of each row in many layers, each with a cache of its own, by one CUDA graph a token: TB/s of the keys and values that
    the token reads, and microseconds of a layer. Included is all that a layer does between its projections. The windows of block_sparse,
    beside one global block, are a part of the tokens; flash has a window of as many keys beside it."""
    for batch, tokens in [(2, 512)] if session.options.dry_run else [(1, 65536), (16, 4096), (16, 16384), (64, 4096)]:
        full, columns, generator = benchmark_case(batch, tokens, dtype=session.dtype), [], torch.Generator(session.device).manual_seed(0)
        caches: Caches = []
        for label, layer, keys in variant_layers(tokens):
            case = full if keys == tokens else replace(full, window_size=(keys - 1, 0))
            count = 2 if session.options.dry_run else max(2, min(MOST_LAYERS, TRAFFIC // case.bytes(), MOST_CACHES // full.bytes()))
            while len(caches) < count:
                caches.append(tuple(torch.randn(batch, tokens, 8, 128, generator=generator, device=session.device, dtype=session.dtype)
                                    for _ in "kv"))
            columns.append((variant_entry(label, layer, case, caches[:count], session.dtype), count))
        counts = {entry.label: count for entry, count in columns}
        line = Line("decode", "variants", f"batch {batch}", tokens)
        rows = harness.compare(line, [entry for entry, _ in columns], ["forward"], session.timing, unit="TB/s")
        yield rows
        us = {row.label: row.ms / counts[row.label] * 1e3 for row in rows if row.ms}
        yield [replace(row, unit="us", value=us.get(row.label), ratio=row.ratio and us[row.label] / us["flash"]) for row in rows]
        del caches, columns


def with_tile(tile: Tile | None, rows: int = 0, **options) -> Callable[[Case, Inputs], Pass]:
    def make(case: Case, x: Inputs) -> Pass:
        from attnzoo_kernels.decode import forward as kernels

        plans = functools.cache(kernels._plan.__wrapped__)
        chosen = kernels.decode_tile

        def table(*arguments, **more) -> Tile:
            return chosen(*arguments, **more) if tile is None or arguments[3] < rows else tile

        def forward() -> Tensor:
            with patch.object(kernels, "_plan", plans), patch.object(kernels, "decode_tile", table):
                return decode_attention(*x[:3], **x.options, impl="triton", **options)

        return only_forward(forward)

    return make


TABLES = {f.__name__: f for f in (speed, call, layouts, pages, shared, fp8, lengths, queries, latents, variants, tiles, group_tiles,
                                  fp8_tiles, latent_tiles)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("decode", list(TABLES), list(BACKENDS))
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference"], {"speed": "tokens in the cache"}, arguments)


if __name__ == "__main__":
    sys.exit(main())
