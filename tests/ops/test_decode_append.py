"""append_rotated into caches of 8 bits, bit by bit as plain PyTorch does; tests/test_decoding.py has those of 16 bits."""

import pytest
import torch

from attnzoo_kernels.decode.append import append_rotated


@pytest.mark.parametrize("rotated", (0, 8, 12))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_new_tokens_in_8_bits(rotated, dtype, device):
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (10 * torch.randn(3, 1, heads, width, generator=generator, device=device) for heads, width in ((4, 12), (2, 12), (2, 20)))
    v[1] *= 100  # beyond 448
    q, k, v = (x.to(dtype) for x in (q, k, v))
    angles = torch.randn(3, 1, rotated // 2, generator=generator, device=device)
    cos, sin = (angles.cos(), angles.sin()) if rotated else (None, None)
    scales = torch.tensor([[0.1, 3.0], [0.7, 1.0]], device=device)
    caches = [torch.full((3, 5, 2, width), 7.0, device=device).to(torch.float8_e4m3fn) for width in (12, 20)]
    expected = [x.clone().view(torch.uint8).flatten(0, 1) for x in caches]
    places = torch.tensor([4, 5, 12], device=device)

    def turned(x):
        if rotated == 0:
            return x
        first, second, rest = x.float().split((rotated // 2, rotated // 2, x.shape[-1] - rotated), dim=-1)
        c, s = cos[:, :, None], sin[:, :, None]
        return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1).to(dtype)

    for cache, x, scale in zip(expected, (turned(k), v), scales, strict=True):
        cache[places] = (x[:, 0].float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    out = append_rotated(q, k, v, cos, sin, *caches, places, *scales)
    assert torch.equal(out, turned(q))
    assert all(torch.equal(cache.view(torch.uint8).flatten(0, 1), x) for cache, x in zip(caches, expected, strict=True))


def test_scales_go_with_caches_of_8_bits(device):
    x, places = torch.zeros(1, 1, 2, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    cache, scale = torch.zeros(1, 3, 2, 16, device=device), torch.ones(2, device=device)
    narrow = cache.to(torch.float8_e4m3fn)
    for caches, scales, name in (((narrow, narrow), (scale, None), "v_scale"), ((cache, cache), (scale, scale), "k_scale")):
        with pytest.raises(ValueError, match=f"{name}: must be given for a cache of float8_e4m3fn and for no other"):
            append_rotated(x, x, x, None, None, *caches, places, *scales)
