"""How many kernels a compiled BERT layer takes on a GPU: what FasterTransformer fused by hand stays fused."""

import pytest
import torch
from hydra.utils import instantiate
from test_configs import compose

FORWARD = 8  # four products, attention, two norms with their residuals, GELU
BOTH = 37  # as measured: ten with gradients, and 27 backward, of which 13 are Inductor's for the gradients of norms and biases


def encoder(n_layers: int, device: str) -> torch.nn.Module:
    """BERT base of so many layers in bfloat16, whose outputs are the last layer's states."""
    cfg = compose("model=bert_base", f"model.n_layers={n_layers}", "data.seq_len=512")
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


def kernels(n_layers: int, n_backwards: int) -> list[str]:
    """Names of the kernels of one pass, one after the other, without copies and fills."""
    from torch.profiler import ProfilerActivity, profile

    model = encoder(n_layers, "cuda")
    model.compile(dynamic=False)
    for _ in range(3):
        run(model, n_backwards, "cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run(model, n_backwards, "cuda")
        torch.cuda.synchronize()
    torch._dynamo.reset()
    events = sorted((e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    return [e.name for e in events if not e.name.startswith(("Memcpy", "Memset", "Command Buffer")) and not e.is_user_annotation]


@pytest.mark.gpu
@pytest.mark.parametrize(("n_backwards", "most"), [(0, FORWARD), (1, BOTH)], ids=["forward", "with the backward"])
def test_a_compiled_layer_takes_few_kernels(n_backwards, most):
    two, three = (kernels(n_layers, n_backwards) for n_layers in (2, 3))
    assert 0 < len(three) - len(two) <= most, "kernels of three layers:\n" + "\n".join(three)


def test_the_pass_that_is_counted_reaches_every_weight():
    model = encoder(1, "cpu")
    model.zero_grad = lambda: None
    run(model, 1, "cpu")
    assert all(p.grad is not None for p in model.blocks.parameters())
