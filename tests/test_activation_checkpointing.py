"""Activation checkpointing: the same gradients from less memory, for every variant, compiled and on two ranks."""

from pathlib import Path

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from tiny_run import column, compose_tiny

from attnzoo import runner
from attnzoo.models import from_config
from attnzoo.training.module import TokenPrediction

CONFIGS = Path(__file__).parent.parent / "configs" / "attention"
VARIANTS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 4, "n_heads": 4, "train_context": 32}


def step(kind, variant, every, wrap=lambda function: function, **options):
    """Loss and gradients of a training step, on packed sequences where the variant takes them, and the numbers that the forward pass kept
    for the backward."""
    attention = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{variant}.yaml"))
    torch.manual_seed(0)
    model = from_config({"_target_": f"attnzoo.models.{kind}", **SIZES, **options}, attention).train()
    model.recompute_every = every
    ids, inputs = torch.randint(53, (2, 32)), {}
    if model.supports.packed:
        ids, inputs = ids.flatten(), {"cu_seqlens": torch.tensor([0, 32, 41, 64], dtype=torch.int32), "max_seqlen": 32}
    kept = 0

    def count(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    def loss_of(model, ids):
        return model(ids, **inputs).float().square().mean()

    torch.manual_seed(1)  # of dropout
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = wrap(loss_of)(model, ids)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, kept


def assert_same(found, expected, **tolerance):
    assert found[0] == pytest.approx(expected[0], abs=tolerance.get("atol", 0))
    torch.testing.assert_close(found[1], expected[1], **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.filterwarnings("ignore:.*dense attention there.*")
@pytest.mark.parametrize(("kind", "variant"), [("GPT", variant) for variant in VARIANTS] + [("BERT", "flash")])
def test_gradients_are_equal_and_less_is_kept(kind, variant):
    # dropout's masks must be the same in both passes; not all variants have it in attention
    drops = get_class(OmegaConf.load(CONFIGS / f"{variant}.yaml")["_target_"]).supports.dropout
    options = {"dropout": 0.2, "attention_dropout": 0.1 if drops else 0.0}
    expected = step(kind, variant, None, **options)
    for every, share in ((1, 0.15), (2, 0.65)):
        found = step(kind, variant, every, **options)
        assert_same(found, expected)
        assert found[2] < share * expected[2]


def test_evaluation_and_inference_recompute_nothing(monkeypatch):
    from attnzoo.models import transformer

    model = from_config({"_target_": "attnzoo.models.GPT", **SIZES}, {"_target_": "attnzoo.attention.flash.FlashAttention"})
    model.recompute_every = 1
    calls = []
    monkeypatch.setattr(transformer, "checkpoint", lambda block, *inputs, use_reentrant: calls.append(block) or block(*inputs))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model.eval()(ids)
    with torch.no_grad():
        model.train()(ids)
    assert not calls
    model(ids)
    assert len(calls) == SIZES["n_layers"]


@pytest.mark.slow
def test_it_compiles_without_a_break():
    torch._dynamo.reset()
    compiled = []

    def wrap(function):
        compiled.append(torch.compile(function, backend="aot_eager", fullgraph=True))
        return compiled[-1]

    others = {"bytes_per_token": None, "record": {}, "seed": 0}
    model = from_config({"_target_": "attnzoo.models.GPT", **SIZES}, {"_target_": "attnzoo.attention.flash.FlashAttention"})
    TokenPrediction(model, None, **others, compile=True, activation_checkpointing=1)  # which tells torch.compile
    expected = step("GPT", "flash", None)
    found = step("GPT", "flash", 1, wrap)
    assert_same(found, expected, rtol=1e-4, atol=1e-6)
    assert found[2] < 0.6 * step("GPT", "flash", None, wrap)[2]


def test_a_run_has_the_same_losses(tmp_path):
    steps = ["trainer.max_steps=3", "model.dropout=0.1", "callbacks.sample=null"]
    for name, extra in (("kept", []), ("again", ["activation_checkpointing=1"])):
        runner.train(compose_tiny(tmp_path / name, *steps, *extra))
    for metric in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(tmp_path / "again", metric) == column(tmp_path / "kept", metric)


@pytest.mark.parametrize("given", ["0", "True", "1.5", "all"])
def test_a_wrong_interval_is_refused(tmp_path, given):
    with pytest.raises(ValueError, match=f"activation_checkpointing='?{given}'?: must be a whole number of at least 1"):
        runner.train(compose_tiny(tmp_path, f"activation_checkpointing={given}"))
