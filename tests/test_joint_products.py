"""Queries, keys and values come from one product, whose weights need not be copied together where they lie side by side."""

import copy

import pytest
import torch
from torch import nn

from attnzoo.attention import joint
from attnzoo.attention.flash import FlashAttention
from attnzoo.models import GPT


def model(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=50, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, attention=FlashAttention, train_context=16, **options)


def weights(of: GPT) -> list[nn.Parameter]:
    return [projection.weight for projection in of.blocks[1].attention.projections]


def logits(of: GPT) -> torch.Tensor:
    with torch.no_grad():
        return of(torch.arange(16)[None])


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_lie_side_by_side_and_stay_so_where_they_are_moved(bias):
    moved = model(bias=bias)
    for convert in (lambda x: x, lambda x: x.to(torch.bfloat16), lambda x: x.float(), lambda x: x.to_empty(device="cpu")):
        convert(moved)
        projections = moved.blocks[1].attention.projections
        assert joint.are_side_by_side([p.weight for p in projections])
        assert not bias or joint.are_side_by_side([p.bias for p in projections])
        assert joint._as_one(weights(moved)).data_ptr() == weights(moved)[0].data_ptr()  # nothing is copied
    assert moved.state_dict().keys() == model(bias=bias).state_dict().keys()


def replaced(of: GPT) -> None:
    of.blocks[1].attention.k_proj.weight = nn.Parameter(weights(of)[1].detach().clone())


def assigned(of: GPT) -> None:
    of.load_state_dict({name: x.clone() for name, x in of.state_dict().items()}, assign=True)


def elsewhere(of: GPT) -> None:
    weights(of)[2].data = weights(of)[2].data.clone()


@pytest.mark.parametrize("change", [replaced, assigned, elsewhere, lambda of: setattr(of, "blocks", copy.deepcopy(of.blocks))])
def test_what_lies_apart_gives_the_same(change):
    changed = model()
    expected = logits(changed)
    change(changed)
    assert not joint.are_side_by_side(weights(changed))
    assert torch.equal(logits(changed), expected)
    with torch.no_grad():
        weights(changed)[1].mul_(2)
    assert torch.equal(logits(changed), changed(torch.arange(16)[None]).detach()) and not torch.equal(logits(changed), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_with_and_without_gradients_the_product_is_the_same_compiled_or_not(autocast):
    attention, x = model(bias=True).blocks[0].attention, torch.randn(3, 5, 32)
    compiled = torch.compile(attention.product, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = attention.product(x)
        assert expected.requires_grad
        with torch.no_grad():
            assert torch.equal(attention.product(x), expected)
            assert torch.equal(compiled(x), expected)
            nn.init.zeros_(attention.q_proj.weight)  # in place: what was compiled reads the parameters themselves
            assert torch.equal(compiled(x)[..., :32], attention.q_proj.bias.to(expected.dtype).expand(3, 5, 32))


def test_an_input_of_another_dtype_is_refused_as_ever():
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        model().blocks[0].attention.product(torch.zeros(2, 32, dtype=torch.bfloat16))


def test_a_model_made_in_inference_mode_can_be_moved():
    with torch.inference_mode():
        made = model().to(torch.bfloat16)
        assert made(torch.arange(16)[None]).isfinite().all()
