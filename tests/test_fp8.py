"""Linear layers by products of 8-bit floats: what they compute, which they are, and the runs that train with them."""

import csv
import json
from functools import partial

import hydra
import pytest
import torch
import torch.nn.functional as F
from tiny_run import ROOT, column, compose_tiny

from attnzoo import fp8, runner
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.mla import MLAttention
from attnzoo.errors import UserError
from attnzoo.models import GPT, BERTClassifier, transformer
from attnzoo.run import values as checks
from attnzoo_kernels.fp8 import rounded

DIM = 32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _needs_products(device):
    if device == "cuda" and (reason := fp8.why_not(torch.device("cuda"))):
        pytest.skip(reason)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """PyTorch's CPU products of 8-bit floats, which no run may take because they are slow, stand in for a GPU's."""
    monkeypatch.setattr(fp8, "why_not", lambda device: None)


def model(attention=FlashAttention, **options) -> GPT:
    torch.manual_seed(0)
    options = {"vocab_size": 50, "pad_vocab_multiple": 64, "dim": DIM, "n_layers": 2, "n_heads": 2, "mlp": "gelu", **options}
    return GPT(attention=attention, train_context=16, **options)


def exact(a: torch.Tensor, b: torch.Tensor, kinds: tuple[torch.dtype, torch.dtype]) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 of what a and b are rounded to, and how far a product with sums in float32 may be from it. Hopper's sums of 32
    products keep 13 bits of the largest."""
    a, b = (values.double() * unit.double() for values, unit in (rounded(x, kind) for x, kind in zip((a, b), kinds, strict=True)))
    terms = a.shape[1]
    step = max(1, terms / 32) * 2.0**-13 if a.is_cuda else terms * 2.0**-24
    return a @ b, step * (a.abs() @ b.abs()) + 1e-30


def assert_near(found: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    value, bound = wanted
    of_dtype = 0 if found.dtype == torch.float64 else torch.finfo(found.dtype).eps
    excess = (found.double() - value).abs() - bound - of_dtype * value.abs()
    assert excess.max() <= 0, excess.max()


@pytest.mark.parametrize("kind, half_step, half_smallest", [(E4M3, 2.0**-4, 2.0**-10), (E5M2, 2.0**-3, 2.0**-17)])
def test_rounding_is_to_the_nearest_in_steps_of_the_largest_element(device, kind, half_step, half_smallest):
    torch.manual_seed(0)
    x = torch.randn(64, 48, device=device) * torch.logspace(-6, 3, 48, device=device)
    values, unit = rounded(x, kind)
    assert values.dtype == kind and unit.shape == () and unit.dtype == torch.float32
    error = (values.double() * unit.double() - x.double()).abs()
    assert (error <= torch.maximum(half_step * x.abs(), half_smallest * unit) * (1 + 1e-6)).all()
    assert values.float().abs().max() == torch.finfo(kind).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(48,), (1,), (3, 11), (7,)], ids=str)
def test_products_and_gradients_are_those_of_the_rounded_factors(device, rows, dtype):
    torch.manual_seed(0)
    x = torch.randn(*rows, DIM, device=device).to(dtype).requires_grad_()
    weight, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((64, DIM), (64,)))
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = fp8.linear(x, weight)
        with_bias = fp8.linear(x, weight, bias)
    assert y.dtype == dtype and y.shape == (*rows, 64)
    flat, grad = x.detach().flatten(0, -2), torch.randn_like(y)
    assert_near(y.flatten(0, -2), exact(flat, weight.detach().t(), (E4M3, E4M3)))
    assert torch.equal(with_bias, y + bias.to(dtype))
    dx, dw, db = torch.autograd.grad(with_bias, (x, weight, bias), grad)
    assert (dx.dtype, dw.dtype) == (dtype, torch.float32)
    grad = grad.flatten(0, -2)
    assert_near(dx.flatten(0, -2), exact(grad, weight.detach(), (E5M2, E4M3)))
    assert_near(dw, exact(grad.t(), flat, (E5M2, E4M3)))
    torch.testing.assert_close(db, grad.sum(0).float())


def test_one_gradient_alone_and_what_is_not_contiguous(device):
    torch.manual_seed(0)
    x, weight = torch.randn(DIM, 48, device=device).t(), torch.randn(DIM, 64, device=device).t()
    (dw,) = torch.autograd.grad(fp8.linear(x, weight.requires_grad_()).sum(), weight)  # of an expanded gradient
    assert_near(dw, exact(torch.ones(64, 48, device=device), x, (E5M2, E4M3)))
    (dx,) = torch.autograd.grad(fp8.linear(x.requires_grad_(), weight.detach()).sum(), x)
    assert_near(dx, exact(torch.ones(48, 64, device=device), weight.detach(), (E5M2, E4M3)))


def test_nothing_and_zeros(device):
    weight = torch.randn(64, DIM, device=device, requires_grad=True)
    for rows, x in ((0, torch.zeros(0, DIM, device=device)), (3, torch.zeros(3, DIM, device=device)), (3, torch.full((3, DIM), 1e-38))):
        y = fp8.linear(x.to(device), weight)
        (dw,) = torch.autograd.grad(y.sum(), weight)
        assert y.shape == (rows, 64) and not y.any() and not dw.any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_never_comes_out_as_one(device, value):
    torch.manual_seed(0)
    x, weight = torch.randn(16, DIM, device=device, requires_grad=True), torch.randn(64, DIM, device=device, requires_grad=True)
    for broken in (x, weight):
        wrong = broken.detach().clone()
        wrong[3, 5] = value
        assert fp8.linear(*(wrong if one is broken else one for one in (x, weight))).isnan().all()
    grad = torch.zeros(16, 64, device=device)
    grad[2, 7] = value
    assert all(g.isnan().all() for g in torch.autograd.grad(fp8.linear(x, weight), (x, weight), grad))


def test_compiled_it_is_one_graph_with_the_same_bits(device):
    torch.manual_seed(0)
    x, weight = torch.randn(33, DIM, device=device, requires_grad=True), torch.randn(64, DIM, device=device, requires_grad=True)
    results = []
    for function in (fp8.linear, torch.compile(fp8.linear, backend="aot_eager", fullgraph=True)):
        y = function(x, weight)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
def test_compiled_by_inductor_its_products_stay_near(device):
    torch.manual_seed(0)
    x, weight = torch.randn(1000, 768, device=device), torch.randn(3072, 768, device=device)
    x, grad = x.bfloat16().requires_grad_(), torch.randn(1000, 3072, device=device).bfloat16()
    y = torch.compile(fp8.linear, fullgraph=True)(x, weight.requires_grad_())
    assert_near(y, exact(x.detach(), weight.detach().t(), (E4M3, E4M3)))
    dx, dw = torch.autograd.grad(y, (x, weight), grad)
    assert_near(dx, exact(grad, weight.detach(), (E5M2, E4M3)))
    assert_near(dw, exact(grad.t(), x.detach(), (E5M2, E4M3)))


@pytest.mark.parametrize("x, weight, error, reason", [
    ((4, 24), (32, 24), ValueError, r"weight: both sizes must be multiples of 16, got shape \(32, 24\)"),
    ((4, 32), (40, 32), ValueError, r"weight: both sizes must be multiples of 16, got shape \(40, 32\)"),
])
def test_sizes_that_do_not_fit_are_refused(x, weight, error, reason):
    with pytest.raises(error, match=reason):
        fp8.linear(torch.randn(x), torch.randn(weight))


def test_dtypes_and_second_derivatives_are_refused():
    x, weight = torch.randn(16, DIM), torch.randn(64, DIM, requires_grad=True)
    with pytest.raises(TypeError, match="x: must be float32, bfloat16 or float16, got torch.float64"):
        fp8.linear(x.double(), weight)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(fp8.linear(x, weight).sum(), weight, create_graph=True)


def test_a_model_keeps_its_names_and_computes_otherwise_in_training_only():
    converted, usual = model(), model()
    found = fp8.convert(converted)
    layers = [f"attention.{letter}_proj" for letter in "qkvo"] + ["mlp.up_proj", "mlp.down_proj"]
    assert found == {"fp8": [*(f"blocks.*.{layer}" for layer in layers), "output layer (64 x 32)"], "bfloat16": []}
    assert fp8.convert(converted) == found  # again changes nothing
    usual.load_state_dict(converted.state_dict(), strict=True)
    converted.load_state_dict(usual.state_dict(), strict=True)
    ids = torch.arange(16)[None]
    products = []
    for each in (converted, usual):
        with torch.no_grad():
            products.append((each.eval()(ids), each.train()(ids)))
    (evaluated, trained), (expected, expected_trained) = products
    assert torch.equal(evaluated, expected) and torch.equal(expected, expected_trained)
    assert not torch.equal(trained, expected)
    assert (trained - expected).norm() < 0.1 * expected.norm()


def test_every_product_of_a_block_goes_by_8_bits(monkeypatch):
    """Queries, keys and values by one; and so does the output layer."""
    counted = []
    monkeypatch.setattr(fp8, "linear", lambda x, weight, bias=None: counted.append(tuple(weight.shape)) or F.linear(x, weight, bias))
    converted = model(n_layers=1, mlp="swiglu", mlp_dim=48, n_kv_heads=1, attention_gate="elementwise")
    fp8.convert(converted)
    converted(torch.arange(16)[None])
    assert counted == [(DIM + 16 + 16, DIM), (DIM, DIM), (DIM, DIM), (48, DIM), (48, DIM), (DIM, 48), (64, DIM)]


def test_what_stays_is_named():
    assert fp8.convert(model(mlp="swiglu", attention_gate="head"))["bfloat16"] == [
        "blocks.*.attention.g_proj (2 x 32)", "blocks.*.mlp.gate_proj (88 x 32)", "blocks.*.mlp.up_proj (88 x 32)",
        "blocks.*.mlp.down_proj (32 x 88)"]
    assert fp8.convert(model(vocab_size=50, pad_vocab_multiple=1, tie_embeddings=False))["bfloat16"] == ["output layer (50 x 32)"]
    classifier = BERTClassifier(n_classes=16, vocab_size=64, dim=DIM, n_layers=1, n_heads=2, attention=FlashAttention, train_context=16)
    found = fp8.convert(classifier)
    assert not any("output" in name for names in found.values() for name in names) and classifier.head_in_8_bits is None
    # what shares a product stays together
    assert fp8.convert(model(n_heads=4, n_kv_heads=1))["bfloat16"] == [
        "blocks.*.attention.q_proj", "blocks.*.attention.k_proj (8 x 32)", "blocks.*.attention.v_proj (8 x 32)"]
    latent = fp8.convert(model(partial(MLAttention, q_lora_rank=24)))
    assert "blocks.*.attention.q_a_proj (24 x 32)" in latent["bfloat16"] and "blocks.*.attention.k_proj" in latent["fp8"]
    with pytest.raises(ValueError, match=r"multiples of 16, and this model's blocks have none: blocks.\*.attention.q_proj \(24 x 24\)"):
        fp8.convert(model(dim=24))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_output_layer_and_loss_in_one_go_by_8_bits_in_training_only(device, impl, monkeypatch):
    operator = transformer.linear_cross_entropy
    monkeypatch.setattr(transformer, "linear_cross_entropy", partial(operator, impl=impl))
    converted = model(n_layers=1).to(device)
    fp8.convert(converted)
    ids = torch.arange(16, device=device)[None]
    for training in (False, True):
        converted.train(training)
        logits = converted(ids)
        fused, apart = converted(ids, targets=ids.flatten()), F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
        torch.testing.assert_close(fused, apart)
        gradients = [torch.autograd.grad(loss, converted.token_embedding.weight)[0] for loss in (fused, apart)]
        assert (gradients[0] - gradients[1]).norm() < (0.1 if training else 1e-4) * gradients[1].norm()


def test_it_learns_what_float32_learns():
    losses = []
    ids = torch.arange(16).repeat(2, 1) * torch.arange(2, 4)[:, None] % 50
    for convert in (lambda of: None, fp8.convert):
        trained = model(n_layers=1)
        convert(trained)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        curve = []
        for _ in range(15):  # PyTorch's products on a CPU are slow
            loss = F.cross_entropy(trained(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        losses.append(torch.tensor(curve))
    fallen = losses[0][0] - losses[0][-1]
    assert fallen > 1
    assert (losses[1] - losses[0]).abs().max() < 0.05 * fallen
    assert not torch.equal(*losses)


@pytest.mark.parametrize("compile", [False, True])
def test_a_run_says_what_it_does_and_goes_on_either_way(tmp_path, on_a_cpu, caplog, monkeypatch, compile):
    backend = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: backend(function, backend="aot_eager", fullgraph=True))
    small = ["model.n_layers=1", "data.seq_len=16", "data.batch_size=2", "trainer.val_check_interval=2", f"compile={compile}"]
    with caplog.at_level("INFO"):
        runner.train(compose_tiny(tmp_path, *small, "trainer.max_steps=2", "trainer.precision=fp8"))
    others = ["gate_proj (88 x 32)", "up_proj (88 x 32)", "down_proj (32 x 88)"]
    layers = {"fp8": [*(f"blocks.*.attention.{letter}_proj" for letter in "qkvo"), "output layer (320 x 32)"],
              "bfloat16": [f"blocks.*.mlp.{name}" for name in others]}
    assert "1 x cpu, fp8" in caplog.text
    assert f"fp8 in training steps: {', '.join(layers['fp8'])}; bfloat16 there" in caplog.text
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["precision"] == "fp8" and record["fp8"] == layers
    content = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    in_bf16, again = tmp_path / "bf16", tmp_path / "again"
    for folder, precision in ((in_bf16, "bf16-mixed"), (again, "fp8")):
        runner.train(compose_tiny(tmp_path, *small, "trainer.max_steps=4", f"trainer.precision={precision}", f"run_dir={folder}/run",
                                  f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt"))
    (theirs, _), (ours, _) = (column(folder, "train/loss") for folder in (in_bf16, again))
    assert theirs != ours and float(theirs) == pytest.approx(float(ours), abs=0.02)
    assert torch.load(in_bf16 / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"].keys() == content["state_dict"].keys()
    if not compile:
        runner.evaluate(compose_tiny(tmp_path, f"ckpt_path={again}/run", f"run_dir={tmp_path}/eval", "accelerator=cpu", "checkpoint=last",
                                     "evaluation=validation", config="eval"))
        (validated,) = [row for row in csv.DictReader((tmp_path / "eval/results.csv").open()) if row["metric"] == "loss"]
        assert float(validated["value"]) == pytest.approx(float(column(again, "val/loss")[-1]))  # both in bfloat16


@pytest.mark.gpu
def test_a_run_on_a_gpu_falls_as_with_bfloat16(tmp_path):
    curves = []
    for precision in ("fp8", "bf16-mixed"):
        runner.train(compose_tiny(tmp_path, "trainer=gpu", f"trainer.precision={precision}", "trainer.max_steps=40", "model.mlp=gelu",
                                  "compile=true", f"run_dir={tmp_path}/{precision}/run"))
        curves.append(torch.tensor([float(value) for value in column(tmp_path / precision, "train/loss")]))
    assert (curves[0] - curves[1]).abs().max() < 0.05 * (curves[1][0] - curves[1][-1])


def test_machines_and_strategies_without_it_are_refused(tmp_path):
    with pytest.raises(UserError, match="precision=fp8 needs an NVIDIA GPU of compute capability 8.9 or later, got cpu; take trainer.prec"):
        runner.train(compose_tiny(tmp_path, "trainer.precision=fp8"))
    with pytest.raises(UserError, match="precision=fp8 does not go with FSDP's first form; take trainer=fsdp2"):
        runner.train(compose_tiny(tmp_path, "trainer=fsdp", "trainer.accelerator=cpu", "trainer.precision=fp8"))


def test_older_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert fp8.why_not(torch.device("cuda")) == "needs an NVIDIA GPU of compute capability 8.9 or later, NVIDIA A100 has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert fp8.why_not(torch.device("cuda")) is None


def test_a_model_without_a_layer_that_fits_is_refused(tmp_path, on_a_cpu):
    with pytest.raises(ValueError, match="precision=fp8 multiplies matrices whose sizes are multiples of 16"):
        runner.train(compose_tiny(tmp_path, "model.dim=24", "trainer.precision=fp8"))


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_it_is_a_way_to_train(tmp_path, command):
    (tmp_path / "x.ckpt").touch()
    with hydra.initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = hydra.compose(command, [f"ckpt_path={tmp_path}/x.ckpt", "precision=fp8", "run_dir=x" if command == "eval" else "prompt=x"])
    check = checks.check_evaluation if command == "eval" else checks.check_generation
    with pytest.raises(UserError, match="precision=fp8 is for training only; evaluate or generate with precision=bf16-mixed"):
        check(cfg)
