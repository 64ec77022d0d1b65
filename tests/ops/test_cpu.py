"""impl="cpu" of every operator against the reference in float64 under the 2x rule, on all cases of the operators, and in linear memory."""

from dataclasses import replace

import pytest
import test_block_sparse
import test_differential
import test_distance_bias
import test_dual_chunk
import test_flash
import test_forgetting
import test_nsa
import test_routed
import test_sigmoid
import torch
from paths import GPU
from test_derivatives import leaves
from test_dispatch import call, function
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnzoo_kernels import dispatch
from attnzoo_kernels.block_sparse import cases as block_sparse
from attnzoo_kernels.differential import cases as differential
from attnzoo_kernels.distance_bias import cases as distance_bias
from attnzoo_kernels.dropout import keep_mask
from attnzoo_kernels.dual_chunk import cases as dual_chunk
from attnzoo_kernels.flash import cases as flash
from attnzoo_kernels.forgetting import cases as forgetting
from attnzoo_kernels.nsa import cases as nsa
from attnzoo_kernels.routed import cases as routed
from attnzoo_kernels.sigmoid import cases as sigmoid
from benchmarks.accuracy import assert_accurate

pytestmark = pytest.mark.skipif(GPU, reason="it is the path of a machine without a GPU")
OPERATORS = {"flash": flash, "block_sparse": block_sparse, "differential": differential, "dual_chunk": dual_chunk, "sigmoid": sigmoid,
             "forgetting": forgetting, "distance_bias": distance_bias}
COMPOSED = {"routed": routed, "nsa": nsa}  # of several operators, or a part of such
LONG = (  # what the fused kernel does by several tiles, parts and blocks of its own
    ("flash", flash.Case(seqlen_q=300, seqlen_k=700, heads=4, kv_heads=2, causal=True)),
    ("flash", flash.Case(seqlen_q=700, heads=1, head_dim=32, window_size=(100, 300), sinks=True)),
    ("flash", flash.Case(seqlen_q=1025, heads=2, q_scale=30.0, causal=True)),
    ("flash", flash.Case(lengths_q=(300, 0, 140), heads=4, kv_heads=2, alibi=True, causal=True)),
    ("block_sparse", block_sparse.Case(batch=2, seqlen_q=300, heads=4, kv_heads=2, head_dim=40, masks="sequence", causal=True)),
    ("block_sparse", block_sparse.Case(lengths_q=(700, 130), masks="head", window_size=(400, 90))),
    ("differential", differential.Case(seqlen_q=300, heads=4, kv_heads=2, value_dim=64, causal=True)),
    *(("dual_chunk", dual_chunk.Case(seqlen_q=600, heads=2, kv_heads=1, chunk_size=200, local_size=50, causal=causal))
      for causal in (True, False)),
    ("dual_chunk", dual_chunk.Case(lengths_q=(500, 0, 140), heads=1, chunk_size=200, local_size=50, multiplier=True)),
    ("sigmoid", sigmoid.Case(seqlen_q=300, seqlen_k=700, heads=4, kv_heads=2, causal=True)),
    ("forgetting", forgetting.Case(seqlen_q=300, seqlen_k=700, heads=4, kv_heads=2, gate=5.0, resets=0.05)),
    ("routed", routed.Case(batch=2, seqlen_q=300, seqlen_k=340, heads=4, kv_heads=2, head_dim=32, block_size=64)),
    ("routed", routed.Case(lengths_q=(260, 0, 17), heads=4, kv_heads=2, head_dim=32, block_size=8, slots=7, shared=True)),
    ("nsa", nsa.Case(seqlen_q=500, heads=4, kv_heads=2, head_dim=32, block_count=3, window=100)),
    ("forgetting", forgetting.Case(lengths_q=(300, 0, 740), heads=2, gate=-3.0)),
    ("distance_bias", distance_bias.Case(seqlen_q=300, seqlen_k=700, heads=4, kv_heads=2, distances=400, origin=90)),
    ("distance_bias", distance_bias.Case(lengths_q=(300, 0, 340), heads=2, causal=True, distances=128)),
)
CASES = [(name, replace(case, dtype=torch.float32)) for name, cases in (OPERATORS | COMPOSED).items()
         for case in cases.CORRECTNESS + getattr(cases, "DROPOUT", ())] + [
    (name, replace(case, dtype=dtype)) for name, case in LONG for dtype in (torch.float32, torch.bfloat16)] + [
    (name, replace(case, dtype=(torch.bfloat16, torch.float16)[n // 5 % 2])) for name, cases in (OPERATORS | COMPOSED).items()
    for n, case in enumerate(cases.CORRECTNESS) if n % 5 == 0]


def run(operator: str, case, impl: str, dtype: torch.dtype | None = None):
    """Output, log-sum-exp and all gradients."""
    if operator == "flash":
        return test_flash.run(case, case.inputs(), impl, dtype)
    if operator == "sigmoid":
        return test_sigmoid.run(case, case.inputs(), impl, dtype)
    if operator == "nsa":
        return test_nsa.run(case, impl, dtype, test_nsa.blocks_of(case))
    by_case = {"differential": test_differential, "distance_bias": test_distance_bias, "forgetting": test_forgetting, "routed": test_routed}
    if operator in by_case:
        return by_case[operator].run(case, impl, dtype)
    return {"block_sparse": test_block_sparse, "dual_chunk": test_dual_chunk}[operator].run(case.inputs(), impl, dtype)


@pytest.mark.parametrize("operator, case", CASES, ids=str)
def test_error_is_at_most_twice_that_of_eager(operator, case, poisoned):
    assert_accurate(run(operator, case, "cpu"), run(operator, case, "reference"), run(operator, case, "reference", torch.float64))


@pytest.mark.parametrize("operator", OPERATORS)
def test_float64_is_the_reference_s(operator, monkeypatch):
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: randn(*shape, **options, dtype=torch.float64))
    dispatch.forget()
    call(operator, "cpu", None)
    assert dispatch.implementations_taken() == {f"{operator} forward": ["reference"]}
    with pytest.raises(NotImplementedError, match='q1? must be float16, bfloat16 or float32, got torch.float64.*impl="reference" does'):
        call(operator, "cpu", "cpu")


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_it_took_is_written_down(operator):
    dispatch.forget()
    call(operator, "cpu", "cpu").sum().backward()
    assert dispatch.implementations_taken() == {f"{operator} backward": ["cpu"], f"{operator} forward": ["cpu"]}


@pytest.mark.parametrize("operator", (*OPERATORS, "moba", "msa", "nsa"))
def test_derivatives_that_it_does_not_have_are_refused(operator):
    out = call(operator, "cpu", "cpu")
    with pytest.raises(NotImplementedError, match='no second derivative, which create_graph=True asks for .*impl="reference" has'):
        torch.autograd.grad(out.sum(), [x for x in leaves(out) if x.requires_grad], create_graph=True)
    run, q = function(operator, "cpu", "cpu")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        run(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("operator", (*OPERATORS, "moba", "msa", "nsa"))
def test_compiles_without_a_graph_break(operator):
    run, q = function(operator, "cpu", "cpu")
    gradients = []
    for attend in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaf = q.detach().requires_grad_()
        gradients.append(torch.autograd.grad(attend(leaf).square().sum(), leaf)[0])
    assert torch.equal(*gradients)


class Largest(TorchDispatchMode):
    """The most elements that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor))])
        return results


@pytest.mark.parametrize("operator, case", [
    ("flash", flash.Case(heads=1, head_dim=16, causal=True, softcap=5.0, sinks=True)),
    ("flash", flash.Case(heads=1, head_dim=16, causal=True, dropout_p=0.1)),
    ("flash", flash.Case(heads=1, head_dim=16, alibi=True)),
    ("block_sparse", block_sparse.Case(heads=1, head_dim=16, causal=True)),
    ("differential", differential.Case(heads=1, head_dim=16)),
    ("dual_chunk", dual_chunk.Case(heads=1, head_dim=16, chunk_size=256, local_size=64)),
    ("sigmoid", sigmoid.Case(heads=1, head_dim=16, causal=True)),
    ("forgetting", forgetting.Case(heads=1, head_dim=16, gate=5.0)),
    ("distance_bias", distance_bias.Case(heads=1, head_dim=16, causal=True)),
    ("routed", routed.Case(heads=1, head_dim=16, block_size=64)),
], ids=str)
def test_memory_is_linear(operator, case):
    elements = []
    for seqlen in (512, 2048):
        with Largest() as largest:
            run(operator, replace(case, seqlen_q=seqlen, dtype=torch.float32), "cpu")
        elements.append(largest.elements)
    assert elements[1] <= 4 * elements[0]


def test_a_part_of_the_dropout_mask_is_that_part():
    state = torch.tensor([3, 5])
    whole = keep_mask(state, 0.4, (2, 3, 40, 50))[0].flatten(0, 1)
    part = keep_mask(state, 0.4, (1, 2, 20, 30), (3, 9, 13))[0].flatten(0, 1)
    assert torch.equal(part, whole[3:5, 9:29, 13:43])
