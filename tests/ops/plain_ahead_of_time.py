"""Compile all variants' plain kernels for a GPU that is not here: `python plain_ahead_of_time.py 90 [operator ...]` prints a JSON line per
kernel. A process of its own, as ahead_of_time.py, whose driver it takes.
"""

import json
import sys

import torch
import triton
from ahead_of_time import ARCH, Driver, loads, resources, wgmma_faults
from triton.runtime.jit import JITFunction

BF16, F32 = torch.bfloat16, torch.float32
CAUSAL, FULL, WINDOW = (-1, 0), (-1, -1), (48, 16)


def tensors(dtype, packed, kv_heads, widths, tokens=256, heads=4):
    """q, k, v, and grad_out, by `widths` (head_dim, value_dim), and cu_seqlens."""
    rows = (tokens,) if packed else (2, tokens)
    q, k = (torch.zeros(*rows, n, widths[0], dtype=dtype) for n in (heads, kv_heads))
    v, grad_out = (torch.zeros(*rows, n, widths[1], dtype=dtype) for n in (kv_heads, heads))
    return q, k, v, grad_out, torch.zeros(3, dtype=torch.int32) if packed else None


def flash():
    from attnzoo_kernels.flash import ops

    for dtype, widths, (left, right), packed, kv_heads, softcap, alibi, sinks, dropout, grad_lse in (
            (BF16, (64, 64), FULL, False, 4, 0.0, False, False, 0.0, False),
            (BF16, (128, 128), CAUSAL, False, 2, 0.0, False, True, 0.0, True),
            (BF16, (128, 128), FULL, False, 4, 0.0, False, False, 0.1, False),
            (BF16, (256, 256), CAUSAL, False, 4, 0.0, False, False, 0.0, False),
            (BF16, (64, 64), CAUSAL, False, 4, 0.0, True, False, 0.0, False),
            (BF16, (64, 64), WINDOW, True, 2, 0.0, True, True, 0.0, True),
            (BF16, (128, 96), CAUSAL, True, 4, 0.0, False, False, 0.0, False),
            (BF16, (128, 128), WINDOW, False, 4, 30.0, False, False, 0.0, False),
            (BF16, (64, 64), FULL, False, 4, 30.0, False, False, 0.1, False),
            (F32, (64, 64), WINDOW, False, 2, 0.0, False, True, 0.1, True),
            (BF16, (64, 64), CAUSAL, True, 4, 0.0, False, False, 0.1, False),  # the rows of a part of each sequence, see dropout_state
            (BF16, (128, 128), FULL, True, 2, 0.0, False, False, 0.1, False),
            (F32, (128, 40), CAUSAL, True, 4, 30.0, True, False, 0.0, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        slopes, sink, rng = (torch.zeros(4) if alibi else None, torch.zeros(4) if sinks else None,
                             torch.zeros(4 if packed else 2, dtype=torch.int64) if dropout else None)
        numbers = ("triton", True, widths[0] ** -0.5, left, right, softcap, dropout)
        out, lse, stats, residual = ops._forward(q, k, v, bounds, bounds, slopes, sink, rng, sinks, *numbers)
        ops._gradients(grad_out, lse if grad_lse else None, q, k, v, out, residual, stats, bounds, bounds, slopes, rng, sink, *numbers)


def ranges():
    """Those of flash over key ranges, and that of their tables."""
    from attnzoo_kernels._triton.range_tables import launch_tables
    from attnzoo_kernels.flash import ops

    launch_tables(torch.zeros(10, 5, dtype=torch.int32))
    table = torch.zeros(3, 8, dtype=torch.int32)
    for dtype, widths, left, kv_heads in ((BF16, (64, 64), -1, 4), (BF16, (128, 128), -1, 2), (BF16, (128, 128), 48, 2),
                                          (BF16, (256, 256), -1, 4), (F32, (64, 64), 48, 2)):
        q, k, v, grad_out, _ = tensors(dtype, True, kv_heads, widths)
        numbers = ("triton", True, widths[0] ** -0.5, left, -1, 0.0, 0.0)
        out, lse, stats, residual = ops._forward(q, k, v, table, table, None, None, None, False, *numbers)
        ops._gradients(grad_out, lse, q, k, v, out, residual, stats, table, table, None, None, None, *numbers)


def block_sparse():
    from attnzoo_kernels.block_sparse import ops

    for dtype, widths, (left, right), packed, kv_heads, block, grad_lse in (
            (BF16, (64, 64), FULL, False, 4, 128, False), (BF16, (128, 128), CAUSAL, False, 2, 64, True),
            (BF16, (256, 256), CAUSAL, False, 4, 128, False), (BF16, (64, 64), WINDOW, False, 4, 32, False),
            (BF16, (128, 128), CAUSAL, True, 2, 128, False), (BF16, (64, 64), FULL, True, 4, 16, True),
            (F32, (64, 64), CAUSAL, False, 4, 32, True), (F32, (128, 96), WINDOW, True, 2, 16, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        blocks = 256 // block
        mask = torch.ones(1, 4, blocks, blocks, dtype=torch.bool)
        options = ("", "triton", True, blocks, blocks, block, block, widths[0] ** -0.5, left, right)
        out, lse, stats = ops._forward(q, k, v, mask, bounds, bounds, *options)
        ops._gradients(grad_out, lse if grad_lse else None, q, k, v, out, stats, mask, bounds, bounds, *options)


def differential():
    from attnzoo_kernels.differential import ops

    for dtype, widths, (left, right), packed, kv_heads, shared_k, needs_dlam in (
            (BF16, (64, 128), CAUSAL, False, 4, False, True), (BF16, (64, 64), FULL, False, 4, True, False),
            (BF16, (128, 256), CAUSAL, False, 4, False, True), (BF16, (128, 128), CAUSAL, True, 2, True, True),
            (BF16, (64, 64), WINDOW, True, 2, False, False), (F32, (64, 128), CAUSAL, False, 4, False, True),
            (F32, (64, 64), WINDOW, True, 2, True, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        q2, k2, lam = torch.zeros_like(q), None if shared_k else torch.zeros_like(k), torch.zeros(4)
        numbers = ("triton", True, widths[0] ** -0.5, left, right)
        out, _, out2, stats = ops._forward(q, q2, k, k2, v, lam, bounds, bounds, *numbers, True)
        ops._gradients(grad_out, q, q2, k, k2, v, lam, out, out2, stats, bounds, bounds, needs_dlam, *numbers)


def dual_chunk():
    from attnzoo_kernels.dual_chunk import ops

    for dtype, widths, causal, packed, kv_heads, multiplier, stages, grad_lse in (
            (BF16, (64, 64), True, False, 4, False, 7, False), (BF16, (128, 128), True, False, 2, True, 7, True),
            (BF16, (256, 256), True, False, 4, False, 7, False), (BF16, (64, 64), False, False, 4, False, 7, True),
            (BF16, (128, 128), True, True, 2, False, 7, False), (BF16, (64, 64), True, False, 4, False, 5, False),
            (F32, (64, 64), True, False, 4, True, 7, True), (F32, (128, 96), False, True, 2, False, 7, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        cos, sin = torch.zeros(2, 256, widths[0] // 2)
        factors = torch.zeros(q.shape[:-2]) if multiplier else None
        options = ("triton", True, 128, 159, 159, stages, causal, False, widths[0] ** -0.5)
        out, lse, stats = ops._forward(q, k, v, cos, sin, factors, bounds, bounds, *options)
        ops._gradients(grad_out, lse if grad_lse else None, q, k, v, out, stats, cos, sin, factors, bounds, bounds, *options)


def sigmoid():
    from attnzoo_kernels.sigmoid import ops

    for dtype, widths, (left, right), packed, kv_heads, bias, alibi in (
            (BF16, (64, 64), FULL, False, 4, None, False), (BF16, (128, 128), CAUSAL, False, 2, -7.0, False),
            (BF16, (64, 64), WINDOW, True, 2, None, True), (BF16, (128, 96), FULL, True, 4, None, False),
            (BF16, (256, 256), CAUSAL, False, 4, None, False), (F32, (64, 64), CAUSAL, True, 2, None, True)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        rest = (bounds, bounds, torch.zeros(4) if alibi else None, "triton", True, widths[0] ** -0.5, bias, left, right)
        ops._forward(q, k, v, *rest)
        ops._gradients(grad_out, q, k, v, *rest)


def forgetting():
    from attnzoo_kernels.forgetting import ops

    for dtype, widths, left, packed, kv_heads, needs_dlog_f, prune in (
            (BF16, (64, 64), -1, False, 4, True, True), (BF16, (128, 128), -1, False, 2, True, True),
            (BF16, (256, 256), -1, False, 4, True, False), (BF16, (64, 64), 48, True, 2, True, True),
            (BF16, (128, 128), -1, True, 2, False, False), (F32, (64, 64), -1, False, 4, True, True),
            (F32, (128, 96), 48, True, 2, True, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        numbers = ("triton", True, widths[0] ** -0.5, left, prune)
        out, residual, lse, *saved = ops._forward(q, k, v, torch.zeros(q.shape[:-1]), bounds, bounds, packed, *numbers)
        ops._gradients(grad_out, lse if packed else None, q, k, v, out, residual, *saved, bounds, bounds, needs_dlog_f, *numbers)


def distance_bias():
    from attnzoo_kernels.distance_bias import ops

    for dtype, widths, (left, right), packed, kv_heads, needs_dbias in (
            (BF16, (64, 64), FULL, False, 4, True), (BF16, (128, 128), CAUSAL, False, 2, True), (BF16, (256, 256), CAUSAL, False, 4, True),
            (BF16, (64, 64), CAUSAL, False, 4, True), (BF16, (64, 64), WINDOW, True, 2, True), (BF16, (128, 96), CAUSAL, True, 4, False),
            (F32, (64, 64), CAUSAL, False, 4, True), (F32, (128, 96), WINDOW, True, 2, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        numbers = ("triton", 16, widths[0] ** -0.5, left, right)
        bias = torch.zeros(4, 100)
        out, lse, stats = ops._forward(q, k, v, bias, bounds, bounds, *numbers)
        ops._gradients(grad_out, lse if packed else None, q, k, v, out, stats, bias, bounds, bounds, needs_dbias, *numbers)


def two_frame():
    from attnzoo_kernels.two_frame import ops

    for dtype, widths, far_keys, packed, kv_heads, grad_lse in (
            (BF16, (64, 64), 2**30, False, 4, False), (BF16, (128, 128), 2**30, False, 2, True), (BF16, (256, 256), 2**30, False, 4, False),
            (BF16, (64, 64), 4, True, 2, True), (BF16, (128, 128), 2**30, True, 2, False), (F32, (64, 64), 2**30, False, 4, True),
            (F32, (128, 96), 4, True, 2, False)):
        q, k, v, grad_out, bounds = tensors(dtype, packed, kv_heads, widths)
        rest = (bounds, bounds, "triton", True, widths[0] ** -0.5, 100, far_keys)
        q, k = (torch.cat((x, x), -2) for x in (q, k))
        out, lse, stats = ops._forward(q, k, v, *rest)
        ops._gradients(grad_out, lse if grad_lse else None, q, k, v, out, stats, *rest)


def routed():
    """With the kernels that choose blocks and order pairs by them."""
    from attnzoo_kernels.moba import choose as moba
    from attnzoo_kernels.msa import choose as msa
    from attnzoo_kernels.nsa import choose as nsa
    from attnzoo_kernels.nsa import units
    from attnzoo_kernels.routed import best, decode, lists, parts, walk

    bounds = torch.tensor([0, 100, 256], dtype=torch.int32)
    for kv_heads in (2, 4000):  # numbers of blocks in 16 and in 32 bits
        first, _, bounds_k, *places = lists.launch_layout(bounds, bounds, 256, 256, 16, 19)
        lists.launch_order(torch.zeros(256, kv_heads, 3, dtype=torch.int32), first, bounds_k, *places, 1, kv_heads, 256)
    for dtype, width in ((BF16, 64), (F32, 128)):
        q, k = (torch.zeros(256, heads, width, dtype=dtype) for heads in (4, 2))
        lse, place = torch.zeros(4, 256), torch.zeros(256 * 4, 3, dtype=torch.int32)
        moba.launch_blocks(q, k, bounds, bounds, bounds, torch.arange(20, dtype=torch.int32), 16, 3)
        msa.launch_blocks(q[:, :2], k[:, :1], bounds, bounds, 16, 3)
        _, _, token_place, source = units.launch_layout(bounds, bounds, 256, 32, 16)
        folded = units.launch_fold(q, None, source, 2, 16)
        units.launch_unfold(folded, token_place, 2, 16)
        gates = torch.zeros(256, 4, 3, dtype=dtype)
        units.launch_combine(folded, q, q, gates, token_place, 2, 16)
        units.launch_combine_backward(q, folded, q, q, gates, token_place, source, 2, 16)
        units.launch_unfold_lse(torch.zeros(64, folded.shape[0]), token_place, 2, 16)
        nsa.launch_blocks(q, k, lse, bounds, bounds, bounds, 32, 16, 64, 15, 0.1)
        part, part_lse, stats = q.new_zeros(256 * 12, 1, width), torch.zeros(1, 256 * 12), torch.zeros(2, 4, 256)
        parts.launch_spread(q, None, place, 1)
        parts.launch_spread(q, stats, place, 1)
        parts.launch_spread(q, lse, place, 1)
        parts.launch_sum(q, part, place, 1, 1)
        parts.launch_merge(q, lse, stats, part, part_lse, torch.stack((part_lse, part_lse)), place, 1, 1)
        if dtype == F32:
            parts.launch_merge_backward(q, lse, q, stats, part, torch.stack((part_lse, part_lse)), place, q, stats, 1)
    q, k, lse = torch.zeros(256, 16, 128, dtype=BF16), torch.zeros(256, 4, 128, dtype=BF16), torch.zeros(16, 256)
    msa.launch_blocks(q[:, :4], k[:, :1], bounds, bounds, 16, 15)
    nsa.launch_blocks(q, k, lse, bounds, bounds, bounds, 32, 16, 64, 15, 0.1)
    best.multiprocessors = lambda device: 132
    for few in (q[:2], q[:2].float()):  # divided among programs
        keys = k.to(few.dtype)
        moba.launch_blocks(few, keys, bounds, bounds, bounds, torch.arange(1100, dtype=torch.int32), 16, 3)
        for block in (1, 32):
            msa.launch_blocks(few[:, :4], keys[:, :1], bounds, bounds, block, 15)
        nsa.launch_blocks(few, keys, lse, bounds, bounds, bounds, 32, 16, 64, 15, 0.1)
    decode.launch_forward = lambda *_, **options: (q, lse)  # see decode_ahead_of_time.py
    for given in ((q, k, k, torch.zeros(256, 4, 3, dtype=torch.int32), bounds, bounds),
                  (q[None], k[None], k[None], torch.zeros(1, 256, 4, 3, dtype=torch.int32), None, None)):
        decode.attend(*given, 16, 0.1)
    decode.attend(q, k, k, None, bounds, bounds, 2**30, 0.1, bounds, 32, 16)
    chosen = torch.zeros(2 * 19 + 1, dtype=torch.int32)
    for widths, block, grad_lse in (((64, 64), 64, True), ((64, 64), 128, False), ((128, 128), 64, False), ((128, 128), 128, True),
                                    ((128, 96), 16, False), ((40, 16), 64, False)):
        q, k, v, grad_out, _ = tensors(BF16, True, 2, widths)
        place, pair = torch.zeros(256 * 2, 3, dtype=torch.int32), torch.zeros(256 * 6, dtype=torch.int32)
        indices = place, pair, chosen, chosen, 2, block, 0.1
        if not walk.takes(q, v, block):
            continue
        walk.launch_forward(q, k, v, *indices)
        walk.launch_backward(grad_out, lse if grad_lse else None, q, k, v, grad_out, stats, *indices, torch.zeros_like(k),
                             torch.zeros_like(v))


def training():
    """What is beside attention in a step: norms of a split stream, and of post-norm blocks in bfloat16."""
    from attnzoo_kernels.add_norm import backward, forward

    x, weight = torch.zeros(256, 768, dtype=BF16), torch.zeros(768)
    low = x.to(torch.int16)
    for begins, rms, bias, last in ((False, False, None, False), (True, False, weight, False), (False, True, None, True)):
        given = (x.float(), None, None) if begins else (x, low, x)
        high, _, _, means, scales = forward.launch_forward(*given, None, weight, bias, 1e-5, rms, last)
        backward.launch_backward(high, x, None if last else x, weight, means, scales, bias is not None, False)
    weight = weight.to(BF16)
    high, _, _, means, scales = forward.launch_forward(x, None, x, weight, weight, weight, 1e-5, False, True)
    backward.launch_backward(high, x, None, weight, means, scales, True, True)


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.compiler.CompiledKernel.__getitem__ = lambda self, grid: lambda *arguments: None  # a second launch of what is compiled
    compiled, run = [], JITFunction.run

    def warm_up(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, options, kernel))
        return kernel

    JITFunction.run = warm_up
    from attnzoo_kernels._triton import launch

    launch.architecture = lambda where: ARCH
    for operator in sys.argv[2:] or ("flash", "ranges", "block_sparse", "differential", "dual_chunk", "sigmoid", "forgetting",
                                     "distance_bias", "two_frame"):
        compiled.clear()
        globals()[operator]()
        for name, constants, kernel in {id(kernel): (name, constants, kernel) for name, constants, kernel in compiled}.values():
            if operator not in ("routed", "training") and "PRECISION" not in constants and "WIDE" not in constants:
                continue
            registers, stack = resources(kernel.asm["cubin"])
            shown = {key: constants.get(key) for key in ("HEAD_DIM", "VALUE_DIM", "PRECISION", "BLOCK_M", "BLOCK_N", "PACKED", "TMA")}
            print(json.dumps({"kernel": name, "registers": registers, "stack": stack, "shared": kernel.metadata.shared,
                              **loads(kernel.asm["ptx"]), **wgmma_faults(kernel), **shown}), flush=True)


if __name__ == "__main__":
    main()
