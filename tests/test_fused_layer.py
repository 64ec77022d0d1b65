"""How many kernels a layer takes on a GPU: what FasterTransformer fused by hand stays fused in a compiled BERT, and what is joined in
decoding stays joined."""

from collections.abc import Callable

import pytest
import torch
from hydra.utils import instantiate
from test_configs import compose

from attnzoo.models.blocks import Block
from attnzoo.models.decoding import Decoding
from benchmarks.accuracy import assert_accurate

FORWARD = 8  # four products, attention, two norms with their residuals, GELU
DECODING = 9  # four products, of which one applies GELU, appending, attention with its merge, two norms with their sums
BOTH = 30  # ten with gradients, and 20 backward


def encoder(n_layers: int, device: str, *options: str) -> torch.nn.Module:
    """BERT base of so many layers in bfloat16, whose outputs are the last layer's states."""
    cfg = compose("model=bert_base", f"model.n_layers={n_layers}", "data.seq_len=512", *options)
    with torch.device(device):
        model = instantiate(cfg.model, vocab_size=1000, _convert_="all").to(torch.bfloat16)
    model.logits = lambda x: x
    return model


def run(model, n_backwards: int, device: str) -> None:
    lengths = torch.tensor([512, 384, 128, 512], device=device)
    inputs = {"cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(), "max_seqlen": 512}
    ids = torch.arange(1536, device=device) % 1000
    with torch.set_grad_enabled(n_backwards > 0):
        states = model(ids, **inputs)
    for _ in range(n_backwards):
        states.backward(torch.ones_like(states))
    model.zero_grad()


def kernels(call: Callable[[], object]) -> list[str]:
    """Names of the kernels of a call, one after the other, without copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = sorted((e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    return [e.name for e in events if not e.name.startswith(("Memcpy", "Memset", "Command Buffer")) and not e.is_user_annotation]


def of_a_pass(n_layers: int, n_backwards: int) -> list[str]:
    model = encoder(n_layers, "cuda")
    model.compile(dynamic=False)
    found = kernels(lambda: run(model, n_backwards, "cuda"))
    torch._dynamo.reset()
    return found


def decoded(n_layers: int, device: str, *options: str) -> Decoding:
    """GPT-2 small of so many layers under bfloat16 autocast, behind a prompt of 64 tokens that it has read. Without a CUDA graph, whose
    kernels are the same."""
    cfg = compose("model=gpt2_small", f"model.n_layers={n_layers}", "data.seq_len=128", *options)
    with torch.device(device), torch.autocast(device, torch.bfloat16):
        model = instantiate(cfg.model, vocab_size=1000, _convert_="all").eval()
        found = model.decoding(torch.arange(64)[None], 8, lengths=torch.tensor([64]), temperature=0)
    found.step()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("n_backwards", "most"), [(0, FORWARD), (1, BOTH)], ids=["forward", "with the backward"])
def test_a_compiled_layer_takes_few_kernels(n_backwards, most):
    two, three = (of_a_pass(n_layers, n_backwards) for n_layers in (2, 3))
    assert 0 < len(three) - len(two) <= most, "kernels of three layers:\n" + "\n".join(three)


@pytest.mark.gpu
@pytest.mark.parametrize("options", (["attention=flash"], ["attention=dual_chunk", "model.positions=rotary"]), ids=("flash", "dual_chunk"))
def test_a_layer_takes_few_kernels_in_decoding(options):
    """Where cuBLAS divides a product's inputs and sums the parts by a second kernel, which is its own choice, that one does not count."""
    two, three = ([name for name in kernels(decoded(n_layers, "cuda", *options).step) if "splitKreduce" not in name] for n_layers in (2, 3))
    assert 0 < len(three) - len(two) <= DECODING, "kernels of three layers:\n" + "\n".join(three)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_sums_and_norms_in_one_kernel_are_as_exact_as_apart(norm, monkeypatch):
    torch.manual_seed(0)
    model = encoder(1, "cpu", f"model.norm={norm}", "model.dim=64", "model.n_heads=2")
    model.zero_grad = lambda: None
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

    def gradients(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model.to(dtype)
        for parameter in model.parameters():
            parameter.grad = None
        run(model, 1, "cpu")
        return {name: parameter.grad for name, parameter in model.blocks.named_parameters()}

    apart = gradients(torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(Block, "norms_sums", lambda self, x: True)
        together = gradients(torch.bfloat16)
    exact = gradients(torch.float64)
    for name, truth in exact.items():
        assert_accurate(together[name], apart[name], truth)


def test_the_pass_that_is_counted_reaches_every_weight():
    model = encoder(1, "cpu")
    model.zero_grad = lambda: None
    run(model, 1, "cpu")
    assert all(p.grad is not None for p in model.blocks.parameters())


def test_the_decoding_that_is_counted_runs():
    assert decoded(2, "cpu").step().shape == (1, 1)
