"""Padding removal: indices, gathering and restoring against NumPy and the references, on any pattern, dtype and stride."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo_kernels import padding
from attnzoo_kernels.padding.cases import CORRECTNESS
from attnzoo_kernels.padding.inputs import contiguous_rows
from benchmarks.accuracy import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("reference", "triton")
MASK_DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
FUZZ = settings(max_examples=25, deadline=None)


def make_mask(bits, batch, seqlen, dtype=torch.bool, transposed=False):
    mask = torch.tensor(bits, dtype=torch.float64).view(batch, seqlen)
    if dtype != torch.bool:
        mask = mask * torch.tensor([1, 3, 2])[torch.arange(mask.numel()) % 3].view_as(mask)  # anything but zero is real
    mask = mask.to(dtype).to(DEVICE)
    return mask.t().contiguous().t() if transposed else mask


@st.composite
def masks(draw):
    batch, seqlen = draw(st.integers(0, 5)), draw(st.integers(0, 40))
    kind = draw(st.sampled_from(["any", "none", "all", "left", "one"]))
    slots = batch * seqlen
    if kind == "any":
        bits = draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    elif kind == "left":
        bits = [i < n for n in draw(st.lists(st.integers(0, seqlen), min_size=batch, max_size=batch)) for i in range(seqlen)]
    elif kind == "one" and slots:
        one = draw(st.integers(0, slots - 1))
        bits = [i == one for i in range(slots)]
    else:
        bits = [kind == "all"] * slots
    return make_mask(bits, batch, seqlen, draw(st.sampled_from(MASK_DTYPES)), draw(st.booleans()))


def expected(kept):
    """indices, cu_seqlens, lengths and position ids by NumPy."""
    kept = kept.cpu().numpy() != 0
    lengths = kept.sum(1)
    positions = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.empty(0)
    return np.flatnonzero(kept), np.concatenate([[0], lengths.cumsum()]), lengths, positions


@FUZZ
@given(masks(), st.integers(0, 50), st.sampled_from(IMPLS))
def test_indices_of_any_mask(mask, spare, impl):
    indices, cu_seqlens, lengths, positions = expected(mask)
    exact = padding.token_indices(mask, impl=impl)
    np.testing.assert_array_equal(exact.indices.cpu(), indices)
    np.testing.assert_array_equal(exact.cu_seqlens.cpu(), cu_seqlens)
    np.testing.assert_array_equal(exact.seqused.cpu(), lengths)
    assert (exact.indices.dtype, exact.cu_seqlens.dtype, exact.seqused.dtype) == (torch.int64, torch.int32, torch.int32)
    assert exact.max_seqlen == exact.longest == max(lengths, default=0)
    assert exact.total == len(indices)

    bound = min(len(indices) + spare, mask.numel())
    bounded = padding.token_indices(mask, max_tokens=len(indices) + spare, impl=impl)
    np.testing.assert_array_equal(bounded.indices.cpu(), np.pad(indices, (0, bound - len(indices)), constant_values=mask.numel()))
    assert torch.equal(bounded.cu_seqlens, exact.cu_seqlens)
    assert bounded.max_seqlen == mask.shape[1]
    found = padding.position_ids(bounded.cu_seqlens, bound, impl=impl).cpu()
    np.testing.assert_array_equal(found, np.pad(positions, (0, bound - len(positions))))


@FUZZ
@given(st.integers(1, 4), st.integers(1, 20), st.data())
def test_unused_slots_are_kept_but_not_counted(batch, seqlen, data):
    bits = st.lists(st.booleans(), min_size=batch * seqlen, max_size=batch * seqlen)
    real, unused = make_mask(data.draw(bits), batch, seqlen), make_mask(data.draw(bits), batch, seqlen, torch.int32, transposed=True)
    rows = torch.randn(batch, seqlen, 3, device=DEVICE)
    for impl in IMPLS:
        tokens, indices, cu_seqlens, max_seqlen, seqused = padding.unpad_input(rows, real, unused, impl=impl)
        kept = real | (unused != 0)
        np.testing.assert_array_equal(indices.cpu(), expected(kept)[0])
        np.testing.assert_array_equal(cu_seqlens.cpu(), expected(kept)[1])
        assert max_seqlen == kept.sum(1).max()
        assert torch.equal(seqused, real.sum(1).int())
        assert torch.equal(tokens, rows[kept])


@FUZZ
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 20), st.sampled_from(IMPLS), st.sampled_from([torch.int32, torch.int64]))
def test_indices_from_lengths(lengths, spare, impl, dtype):
    seqlen = max(lengths, default=0) + spare
    mask = torch.arange(seqlen) < torch.tensor(lengths, dtype=dtype)[:, None]
    on_host = padding.token_indices_from_lengths(lengths, seqlen, device=DEVICE, impl=impl)
    on_device = padding.token_indices_from_lengths(torch.tensor(lengths, dtype=dtype, device=DEVICE), seqlen, impl=impl)
    for packing in (on_host, on_device):
        np.testing.assert_array_equal(packing.indices.cpu(), expected(mask)[0])
        np.testing.assert_array_equal(packing.cu_seqlens.cpu(), expected(mask)[1])
        assert packing.seqused.tolist() == lengths
        assert packing.max_seqlen == max(lengths, default=0)


@FUZZ
@given(st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4), st.integers(0, 9), st.sampled_from(IMPLS))
def test_documents_in_rows(documents, spare, impl):
    seqlen = max(map(sum, documents)) + max(map(len, documents)) + spare
    lengths = torch.tensor([row + [0] * (seqlen - len(row)) for row in documents], dtype=torch.int64, device=DEVICE)
    lengths = lengths.view(len(documents), seqlen)
    rows = torch.randn(len(documents), seqlen, 2, device=DEVICE)
    tokens, indices, cu_seqlens, max_seqlen = padding.unpad_input_for_concatenated_sequences(rows, lengths, impl=impl)
    flat = list(itertools.chain(*documents))
    assert cu_seqlens.tolist() == [0, *itertools.accumulate(flat)]
    assert max_seqlen == max(flat, default=0)
    assert torch.equal(tokens, torch.cat([row[: sum(n)] for row, n in zip(rows, documents, strict=True)]))
    assert padding.position_ids(cu_seqlens, sum(flat), impl=impl).tolist() == [i for n in flat for i in range(n)]

    bounds = {"max_tokens": sum(flat) + 3, "max_documents": len(flat) + 2}
    bounded = padding.unpad_input_for_concatenated_sequences(rows, lengths, **bounds, impl=impl)
    room = min(len(flat) + 2, lengths.numel())
    assert bounded[2].tolist() == cu_seqlens.tolist() + [sum(flat)] * (room - len(flat))
    assert torch.equal(bounded[1][: len(indices)], indices)
    assert (bounded[1][len(indices) :] == lengths.numel()).all()
    assert bounded[3] == seqlen


def test_rows_longer_than_a_block():
    """Of the kernels' programs: their sums must carry over."""
    lengths = torch.tensor([2500, 0, 1024, 1030], device=DEVICE)
    mask = torch.arange(2500, device=DEVICE) < lengths[:, None]
    rows = mask.float()
    documents = torch.zeros(4, 2500, dtype=torch.int64, device=DEVICE)
    documents[0, :1250], documents[2, :2], documents[3, 1], documents[3, 1100] = 2, 512, 1000, 30
    of_lengths = padding.token_indices_from_lengths(lengths, 2500, impl="triton")
    of_mask = padding.token_indices(mask, mask, impl="triton")
    of_documents = padding.unpad_input_for_concatenated_sequences(rows, documents, impl="triton")
    reference = padding.unpad_input_for_concatenated_sequences(rows, documents, impl="reference")
    for packing in (of_lengths, of_mask):
        assert torch.equal(packing.indices, mask.flatten().nonzero().flatten())
        assert packing.cu_seqlens.tolist() == [0, 2500, 2500, 3524, 4554]
        assert packing.seqused.tolist() == lengths.tolist()
        assert packing.max_seqlen == 2500
    assert torch.equal(of_documents[1], of_mask.indices)
    assert torch.equal(of_documents[2], reference[2])
    assert of_documents[2].tolist() == [*range(0, 2501, 2), 3012, 3524, 4524, 4554]
    assert of_documents[3] == reference[3] == 1000
    positions = [padding.position_ids(reference[2], 4554, impl=impl) for impl in IMPLS]
    assert torch.equal(*positions)


def test_lengths_are_read_on_the_host_whatever_torch_s_default_device_is():
    with torch.device("meta"):
        packing = padding.token_indices_from_lengths([1, 2], 3)
    assert packing.indices.tolist() == [0, 3, 4] and packing.cu_seqlens.tolist() == [0, 1, 3]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", CORRECTNESS, ids=str)
def test_remove_and_restore_are_exact(case, impl, poisoned):
    mask, rows = case.mask(DEVICE), case.rows(DEVICE)
    tokens, indices, *_ = padding.unpad_input(rows, mask, max_tokens=case.tokens + 2, impl=impl)
    assert torch.equal(tokens[: case.tokens], rows[mask])
    assert not tokens[case.tokens :].any()
    restored = padding.pad_input(tokens, indices, case.batch, case.seqlen, impl=impl)
    assert torch.equal(restored, rows * mask[..., None])
    again = padding.pad_input(tokens, indices, case.batch, case.seqlen, impl=impl)
    assert torch.equal(again, restored)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (3, 0)])
def test_any_dtype_and_trailing_shape(dtype, shape, impl):
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], device=DEVICE)
    rows = torch.arange(6 * max(1, int(np.prod(shape))), device=DEVICE)[: 6 * int(np.prod(shape))].view(2, 3, *shape).to(dtype)
    tokens, indices, *_ = padding.unpad_input(rows, mask, impl=impl)
    assert torch.equal(tokens, rows[mask.bool()])
    rows[mask == 0] = 0
    assert torch.equal(padding.pad_input(tokens, indices, 2, 3, impl=impl), rows)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_with_strides(impl):
    storage = torch.randn(7, 3, 2, 8, device=DEVICE)
    rows = storage[:, :, 1].transpose(0, 1)  # (3, 7, 8): rows apart, batch and seqlen swapped
    mask = torch.rand(3, 7, device=DEVICE) < 0.5
    tokens, indices, *_ = padding.unpad_input(rows, mask, impl=impl)
    assert torch.equal(tokens, rows[mask])
    wide = torch.randn(tokens.shape[0], 12, device=DEVICE)
    assert torch.equal(padding.pad_input(wide[:, 2:10], indices, 3, 7, impl=impl)[mask], wide[:, 2:10])
    with pytest.raises(ValueError, match=r"hidden_states: dimensions from 2 on must be contiguous.*\.contiguous"):
        padding.unpad_input(storage.transpose(2, 3), mask.t(), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_beyond_2_31_elements(impl):
    """Rows 2**31 bytes apart; a CPU touches a few pages of the storage only."""
    far = 2**31 + 64
    storage = torch.empty(far + 8, dtype=torch.int8, device=DEVICE)
    rows = storage.as_strided((1, 2, 8), (0, far, 1))
    rows.copy_(torch.arange(16).view(1, 2, 8))
    mask = torch.tensor([[True, True]], device=DEVICE)
    indices = padding.token_indices(mask, impl=impl).indices
    assert torch.equal(padding.remove_padding(rows, indices, impl=impl), rows[0])
    assert torch.equal(padding.pad_input(rows[0], indices, 1, 2, impl=impl)[0], rows[0])


@pytest.mark.gpu
def test_results_beyond_2_31_elements():
    batch, seqlen, width = 3, 24000, 32768  # 2.36e9 bytes
    rows = torch.randint(-128, 127, (batch, seqlen, width), dtype=torch.int8, device="cuda")
    mask = torch.ones(batch, seqlen, dtype=torch.bool, device="cuda")
    mask[0, ::2] = False
    tokens, indices, *_ = padding.unpad_input(rows, mask, impl="triton")
    at = torch.tensor([0, 11_999, 12_000, len(tokens) - 1], device="cuda")
    assert torch.equal(tokens[at], rows.flatten(0, 1)[indices[at]])
    restored = padding.pad_input(tokens, indices, batch, seqlen, impl="triton")
    assert torch.equal(restored[-1], rows[-1])
    assert not restored[0, ::2].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients(impl):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]], device=DEVICE)
    rows = torch.randn(3, 3, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    indices = padding.token_indices(mask, max_tokens=5, impl=impl).indices
    tokens = torch.randn(5, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: padding.remove_padding(x, indices, impl=impl).square(), rows)
        assert check(lambda x: padding.pad_input(x, indices, 3, 3, impl=impl).square(), tokens)
    padding.remove_padding(rows, indices, impl=impl).sum().backward()  # an expanded gradient
    assert torch.equal(rows.grad, mask[..., None].expand_as(rows).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("case", [case for case in CORRECTNESS if case.width > 8], ids=str)
def test_add_norm_and_restore(case, dtype, poisoned):
    """Within twice eager's error, outputs and gradients, with tokens left out at the end."""
    mask = case.mask(DEVICE)
    indices = padding.token_indices(mask, max_tokens=case.tokens + 2, impl="reference").indices
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(indices), case.width)] * 2 + [(case.width,)] * 2
    given = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    dout = torch.randn(case.batch, case.seqlen, case.width, generator=generator).to(DEVICE, dtype)

    def run(impl, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = padding.add_norm_pad_input(*leaves, indices, case.batch, case.seqlen, eps=1e-5, impl=impl)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    ours, eager, exact = run("triton", dtype), run("reference", dtype), run("reference", torch.float64)
    assert not ours[0][~mask].any()
    for value, same_maths, truth in zip(ours, eager, exact, strict=True):
        assert_accurate(value, same_maths, truth)
    assert all(torch.equal(a, b) for a, b in zip(ours, run("triton", dtype), strict=True))


@pytest.mark.slow
def test_operators_are_sound():
    """Fakes, strides and autograd registration, by PyTorch's own check."""
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]], device=DEVICE)
    unused = torch.tensor([[0, 1, 0], [0, 0, 0]], device=DEVICE)
    ops = torch.ops.attnzoo
    indices = padding.token_indices(mask, max_tokens=4, impl="triton").indices
    rows = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
    tokens = torch.randn(4, 4, device=DEVICE, requires_grad=True)
    lengths = torch.tensor([2, 1], device=DEVICE)
    for operator, arguments in (
        (ops.padding_mask_indices, (mask, unused, 4)),
        (ops.padding_length_indices, (lengths, 3, 4)),
        (ops.padding_document_lengths, (mask, 4)),
        (ops.padding_position_ids, (torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE), 5)),
        (ops.padding_remove, (rows, indices)),
        (ops.padding_restore, (tokens, indices, 2, 3)),
        (ops.padding_add_norm, (tokens, tokens.detach(), torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE), indices, 2, 3, 1e-5)),
    ):
        torch.library.opcheck(operator, arguments)


def test_compiles_whole_with_a_bound():
    compiled = torch._dynamo.testing.CompileCounter()

    @torch.compile(fullgraph=True, backend=compiled)
    def step(rows, mask, max_tokens):
        tokens, indices, cu_seqlens, *_ = padding.unpad_input(rows, mask, max_tokens=max_tokens, impl="triton")
        positions = padding.position_ids(cu_seqlens, indices.shape[0], impl="triton")
        return padding.pad_input(tokens * positions[:, None], indices, *mask.shape, impl="triton")

    torch._dynamo.reset()
    for seqlen in (7, 9, 11, 13):
        mask = torch.zeros(3, seqlen, dtype=torch.bool, device=DEVICE)
        mask[:, 2:6] = True
        out = step(torch.ones(3, seqlen, 4, device=DEVICE), mask, seqlen + 6)
        assert out[1, :, 0].tolist() == [0, 0, 0, 1, 2, 3] + [0] * (seqlen - 6)
    assert compiled.frame_count <= 2


@pytest.mark.gpu
def test_waits_for_the_device_only_for_exact_shapes():
    mask, rows = torch.rand(4, 50, device="cuda") < 0.5, torch.randn(4, 50, 8, device="cuda", requires_grad=True)
    documents = torch.zeros(4, 50, dtype=torch.int32, device="cuda")

    def step():
        tokens, indices, cu_seqlens, _, _ = padding.unpad_input(rows, mask, max_tokens=150)
        padding.position_ids(cu_seqlens, 150)
        padding.token_indices_from_lengths([3, 50, 0, 1], 50, device="cuda")
        padding.unpad_input_for_concatenated_sequences(rows, documents, max_tokens=200, max_documents=20)
        padding.pad_input(tokens, indices, 4, 50).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            padding.token_indices(mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_step_in_a_cuda_graph():
    mask, rows = torch.rand(4, 50, device="cuda") < 0.5, torch.randn(4, 50, 8, device="cuda")

    def step():
        tokens, indices, *_ = padding.unpad_input(rows, mask, max_tokens=200)
        return padding.pad_input(tokens * 2, indices, 4, 50)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for share in (0.0, 0.3, 1.0):
        mask.copy_(torch.rand(4, 50, device="cuda") < share)
        graph.replay()
        assert torch.equal(out, rows * 2 * mask[..., None])


FIRST_CALL_CAPTURED = """
import sys, torch
from attnzoo_kernels import padding
from attnzoo_kernels.padding.cases import BENCHMARK
case, operation = BENCHMARK[0], sys.argv[1]
mask, rows = case.mask("cuda"), case.rows("cuda")
indices = mask.flatten().nonzero().flatten()
x, dout = (rows, rows[mask]) if operation == "remove" else (rows[mask], rows)
x.requires_grad_()
def step():
    out = padding.remove_padding(x, indices) if operation == "remove" else padding.pad_input(x, indices, case.batch, case.seqlen)
    return out, *torch.autograd.grad(out, x, dout)
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
graph.replay()
assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
print("same")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["remove", "restore"])
def test_the_first_differentiable_call_of_a_process_in_a_cuda_graph(operation):
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_CAPTURED, operation], capture_output=True, text=True, timeout=300)
    assert done.stdout == "same\n", done.stderr


@pytest.mark.skipif(DEVICE == "cuda", reason="values are checked on CPU tensors")
@pytest.mark.parametrize("impl", IMPLS)
def test_wrong_values_are_refused(impl):
    mask = torch.ones(2, 3, dtype=torch.bool)
    rows, tokens = torch.zeros(2, 3, 4), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="max_tokens: must be at least the 6"):
        padding.token_indices(mask, max_tokens=5, impl=impl)
    for padded in (-torch.inf, -1e4, torch.nan):
        additive = torch.tensor([[0.0, padded, 0.0], [0.0, 0.0, 0.0]])
        with pytest.raises(ValueError, match="attention_mask: must be at least 0, .* got .*; an additive mask goes in as mask == 0"):
            padding.token_indices(additive, impl=impl)
        with pytest.raises(ValueError, match="attention_mask: must be at least 0"):
            padding.unpad_input(rows, additive, max_tokens=6, impl=impl)
        assert padding.token_indices(additive == 0, impl=impl).indices.tolist() == [0, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="lengths: .*at most seqlen=3.*got 1 and 4"):
        padding.token_indices_from_lengths(torch.tensor([1, 4]), 3, impl=impl)
    with pytest.raises(ValueError, match="lengths: .*at most seqlen=3.*got -1 and 2"):
        padding.token_indices_from_lengths([-1, 2], 3, impl=impl)
    with pytest.raises(ValueError, match="max_tokens: must be at least the 4"):
        padding.token_indices_from_lengths([2, 2], 3, max_tokens=3, impl=impl)
    for wrong in ([3, 1], [1, 1]):
        with pytest.raises(ValueError, match="indices: must be strictly ascending"):
            padding.pad_input(tokens, torch.tensor(wrong), 2, 3, impl=impl)
    with pytest.raises(ValueError, match=r"indices: must lie in 0 .. batch \* seqlen = 6, got 1 .. 7"):
        padding.remove_padding(rows, torch.tensor([1, 7]), impl=impl)
    with pytest.raises(ValueError, match="attention_mask_in_length: .*at most seqlen=3 a row"):
        padding.unpad_input_for_concatenated_sequences(rows, torch.tensor([[2, 2, 0], [1, 0, 0]]), impl=impl)
    with pytest.raises(ValueError, match="max_documents: must be at least the 2"):
        padding.unpad_input_for_concatenated_sequences(rows, torch.tensor([[1, 1, 0], [0, 0, 0]]), max_tokens=6, max_documents=1, impl=impl)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "call",
    [
        "token_indices(torch.ones(2, 3, device='cuda'), max_tokens=5, impl=impl)",
        "token_indices(torch.tensor([[0.0, -1e4]], device='cuda'), max_tokens=2, impl=impl)",
        "token_indices_from_lengths(torch.tensor([1, 4], device='cuda'), 3, impl=impl)",
        "pad_input(torch.zeros(2, 4, device='cuda'), torch.tensor([3, 1], device='cuda'), 2, 3, impl='triton')",
        "remove_padding(torch.zeros(2, 3, 4, device='cuda'), torch.tensor([1, 7], device='cuda'), impl=impl)",
    ],
)
def test_wrong_values_fail_an_assertion_on_a_gpu(call, impl):
    program = f"import torch; from attnzoo_kernels.padding import *; impl = {impl!r}; {call}; torch.cuda.synchronize()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode != 0
    assert "assert" in result.stderr


def test_wrong_arguments_are_refused():
    mask, rows, indices = torch.ones(2, 3), torch.zeros(2, 3, 4), torch.tensor([0, 1])
    lengths, norm = torch.ones(2, 3, dtype=torch.int64), (torch.ones(3), torch.ones(3))
    for error, words, call in (
        (TypeError, "attention_mask: must be a tensor", lambda: padding.token_indices([[1]])),
        (ValueError, "attention_mask: must have shape", lambda: padding.token_indices(mask[0])),
        (ValueError, r"attention_mask: must have shape \(2, 3\)", lambda: padding.unpad_input(rows, mask[:, :2])),
        (TypeError, "attention_mask: must be bool", lambda: padding.token_indices(mask.to(torch.complex64))),
        (ValueError, "unused_mask: must have shape", lambda: padding.token_indices(mask, mask.t())),
        (TypeError, "max_tokens: must be a Python int", lambda: padding.token_indices(mask, max_tokens=mask.sum())),
        (ValueError, "max_tokens: must be an integer of at least 0, got -1", lambda: padding.token_indices(mask, max_tokens=-1)),
        (ValueError, "below 2", lambda: padding.token_indices(torch.ones(1, 1).expand(2**16, 2**15))),
        (ValueError, "impl: must be", lambda: padding.token_indices(mask, impl="gluon")),
        (TypeError, "lengths: must be int32", lambda: padding.token_indices_from_lengths(torch.ones(2), 3)),
        (ValueError, "hidden_states: must be", lambda: padding.unpad_input(rows[0, 0], mask)),
        (TypeError, "hidden_states: must have elements", lambda: padding.unpad_input(rows.to(torch.complex128), mask)),
        (TypeError, "indices: must be int64", lambda: padding.pad_input(rows[0], indices.int(), 2, 3)),
        (ValueError, "indices: must have shape", lambda: padding.pad_input(rows[0], indices[None], 2, 3)),
        (ValueError, "indices: must hold one entry for each of the 3 tokens of hidden_states",
         lambda: padding.pad_input(rows[0], indices, 2, 3)),
        (ValueError, "residual: must be .tokens, width.", lambda: padding.add_norm_pad_input(rows[0], rows[0, :2], *norm, indices, 2, 3)),
        (ValueError, "weight: must be floating point of shape", lambda: padding.add_norm_pad_input(rows[0], rows[0], *norm, indices, 2, 3)),
        (TypeError, "weight: must be a tensor, got NoneType",
         lambda: padding.add_norm_pad_input(rows[0], rows[0], None, norm[1], indices, 2, 3)),
        (TypeError, "eps: must be a finite number, got 'a'",
         lambda: padding.add_norm_pad_input(rows[0, :2], rows[0, :2], torch.ones(4), torch.ones(4), indices, 2, 3, eps="a")),
        (ValueError, "max_tokens: must be an integer of at least 0, got 10.0", lambda: padding.token_indices(mask, max_tokens=10.0)),
        (ValueError, "batch: must be an integer of at least 0, got 2.0", lambda: padding.pad_input(rows[0, :2], indices, 2.0, 3)),
        (ValueError, "total: must be an integer of at least 0, got None", lambda: padding.position_ids(indices.int(), None)),
        (ValueError, "total: must be an integer of at least 0, got '8'", lambda: padding.position_ids(indices.int(), "8")),
        (ValueError, "must be given both", lambda: padding.unpad_input_for_concatenated_sequences(rows, lengths, max_tokens=3)),
        (TypeError, "cu_seqlens: must be an int32 tensor of shape .sequences . 1,., got list", lambda: padding.position_ids([0, 3], 3)),
        (TypeError, "cu_seqlens: must be int32", lambda: padding.position_ids(indices, 3)),
    ):
        with pytest.raises(error, match=words):
            call()


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        padding.token_indices(torch.ones(1, 2), impl="triton")


@given(st.permutations(range(4)), st.integers(0, 3))
def test_contiguous_rows_agrees_with_pytorch(order, leading):
    x = torch.empty(2, 1, 3, 4).permute(*order)
    row = x[(0,) * leading]
    assert contiguous_rows(x, leading) == row.is_contiguous()


def test_benchmark_runs(capsys):
    from benchmarks import padding as benchmark

    backends = ["attnzoo-reference", "recipe", "copy"]
    if not torch.cuda.is_available():  # a dry run is on the CPU, where kernels run in the interpreter or not at all
        backends.append("attnzoo-triton")
    assert benchmark.main(["indices", "rows", "host", "--dry-run", "--backends", *backends]) == 0
    printed = capsys.readouterr().out
    assert "indices" in printed
    assert "allowed error" not in printed
    assert "Error" not in printed
