"""generate() of every variant in configs/attention: with a cache or without, it is what reading the whole prefix at every step gives."""

from pathlib import Path

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch.testing import assert_close

from attnzoo.attention.base import POSITIONS, Supports
from attnzoo.attention.flash import FlashAttention
from attnzoo.models import GPT, from_config
from attnzoo.models.gpt import draw

CONFIGS = Path(__file__).parent.parent / "configs" / "attention"
VARIANTS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
SIZES = {"vocab_size": 53, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "train_context": 16, "max_positions": 512}
MODES = {"greedy": {"temperature": 0}, "temperature": {"temperature": 0.7}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.8},
         "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9}}


def build(variant, positions, device):
    attention = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{variant}.yaml"))
    can = get_class(attention["_target_"]).supports
    if not (can.causal and positions in can.positions):
        pytest.skip("refused pairing")
    torch.manual_seed(0)
    model = from_config({"_target_": "attnzoo.models.GPT", "positions": positions, **SIZES}, attention).eval().to(device)
    for parameter in model.parameters():  # spread the logits: near ties would be decided by rounding
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    return model.float() if device == "cuda" else model.double()


def read_again(model, tokens, count, generator, options):
    """As generate(), without a cache."""
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, draw(model(tokens)[:, -1].float(), generator=generator, **options)], dim=1)
    return tokens


# past the training context and the end of a dual chunk; a prompt of several blocks of a pattern; drawing has no part in positions
@pytest.mark.parametrize("positions, seqlen, count, mode", [
    *((positions, *case) for positions in POSITIONS for case in ((5, 43, "greedy"), (5, 43, "all"), (400, 5, "greedy"))),
    *(("rotary", 5, 43, mode) for mode in ("temperature", "top_k", "top_p"))])
@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_equals_reading_the_whole_prefix_again(variant, positions, seqlen, count, mode, device):
    model = build(variant, positions, device)
    prompt = torch.randint(53, (2, seqlen), generator=torch.Generator().manual_seed(1)).to(device)
    options = MODES[mode]
    seeded = [torch.Generator(device).manual_seed(2) for _ in range(2)]
    generated = model.generate(prompt, count, generator=seeded[0], **options)
    assert torch.equal(generated, read_again(model, prompt, count, seeded[1], options))
    assert generated.shape == (2, seqlen + count) and torch.equal(generated[:, :seqlen], prompt)


def test_a_variant_without_a_cache_writes_the_same():
    class Forgetful(FlashAttention):
        supports = Supports(cache=False)

    texts = []
    for attention in (FlashAttention, Forgetful):
        torch.manual_seed(0)
        texts.append(GPT(**SIZES, attention=attention).generate(torch.arange(10).view(2, 5), 20, temperature=0))
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ({}, {"window_size": [5, 0]}, {"softcap": 5.0}, {"sinks": True}), ids=str)
def test_decoding_reads_the_cache_as_flash_attention_does(options, monkeypatch):
    """Logits of token after token in bfloat16, with and without the decoding kernel, against float32."""
    from attnzoo.attention import base
    from benchmarks.accuracy import error_ratio

    torch.manual_seed(0)
    model = GPT(**SIZES, attention=lambda spec: FlashAttention(spec, **options)).cuda().eval()
    ids = torch.randint(53, (2, 40), device="cuda")

    def read(dtype):
        caches = model.to(dtype).new_cache(2, 40)
        with torch.no_grad():
            return torch.cat([model(part, cache=caches) for part in ids.split([20, 1, 1, 16, 2], dim=1)], dim=1)

    exact = read(torch.float32)
    ours = read(torch.bfloat16)
    monkeypatch.setattr(base, "DECODED_TOKENS", 0)
    assert error_ratio(ours, read(torch.bfloat16), exact) <= 1


def test_draws_follow_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, -1)
    weights = logits[0].softmax(0)

    def shares(**options):
        return draw(logits, generator=torch.Generator().manual_seed(0), **options).flatten().bincount(minlength=4) / len(logits)

    def close(found, expected):
        assert_close(found, expected, rtol=0, atol=5 * 0.5 / len(logits) ** 0.5)

    close(shares(), weights)
    close(shares(temperature=2.0), (logits[0] / 2).softmax(0))
    kept = weights.clone()
    kept[2:] = 0
    assert weights[0] < 0.7 < weights[:2].sum()
    for options in ({"top_p": 0.7}, {"top_k": 2}, {"top_k": 2, "top_p": 1.0}):
        close(shares(**options), kept / kept.sum())
        assert not shares(**options)[2:].any()
    # of the two that top_k leaves, the first one alone reaches p
    assert shares(top_k=2, top_p=weights[0].item())[0] == 1
    assert shares(top_p=1e-6)[0] == 1


@pytest.mark.parametrize("top_p", (0.0, -0.5, 1.5))
def test_top_p_is_a_probability(top_p):
    with pytest.raises(ValueError, match=rf"top_p={top_p}: must lie in \(0, 1\]"):
        GPT(**SIZES, attention=FlashAttention).generate(torch.zeros(1, 1, dtype=torch.int64), 1, top_p=top_p)
