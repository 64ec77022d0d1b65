"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434): keys and values of all heads come from one narrow latent per token.

In training and for prompts the keys and values of all heads are computed, and `attnzoo_kernels.flash_attention` runs. The cache holds only
the latent and the rotary part of the keys. A few new tokens over a cache attend in the latent space, where all heads share one key.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo.attention.norm import RMSNorm
from attnzoo.attention.positions import rotate
from attnzoo.signatures import Count
from attnzoo_kernels import flash_attention, latent_decode_attention
from attnzoo_kernels.decode import LATENT_WIDTHS

ABSORBED_TOKENS = 16  # the most new tokens per sequence that attend in the latent space; more are computed like a prompt
WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NORM_EPS = 1e-6  # eps of the latents' norms, as published


class MLAttention(Attention):
    """Each query and key has a part without positions and a rotated part. The rotated part of a key is shared by all heads. The other part
    of the keys, and the values, are linear projections of a latent, which is RMSNorm(x W).

    Parameters have the published names, with two exceptions. `q_proj` also stands for q_b_proj, which makes queries from their latent.
    `k_proj` and `v_proj` are the rows of kv_b_proj for keys and for values. As published, these projections of latents have no bias.

    kv_lora_rank: width of the latent, None for 4 head_dim. q_lora_rank: width of the queries' latent, None for queries made from x.
    qk_nope_head_dim: a head's channels without positions, None for head_dim. qk_rope_head_dim: a head's rotated channels, an even number,
        None for head_dim / 2 rounded down to an even number (at least 2). With model.positions=learned or none they are not rotated.
    v_head_dim: channels of a head's values, None for head_dim.
    impl: the implementation of `flash_attention` ("gluon", "triton", "cpu", "reference"), None for the fastest that runs. Decoding on a GPU
        takes the kernel `latent_decode_attention` for latents of up to 512 channels and up to 64 rotated ones, unless impl="reference".

    The defaults are DeepSeek-V2's for head_dim=128. Scores are scaled by (qk_nope_head_dim + qk_rope_head_dim) ** -0.5. With
    rope_scaling=yarn and its mscale_all_dim they are also scaled by (0.1 mscale_all_dim log(rope_factor) + 1) ** 2.
    """

    supports = Supports(positions=("learned", "rotary", "none"), context_parallel=("dense", "packed"))
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, kv_lora_rank: Count | None = None, q_lora_rank: Count | None = None,
                 qk_nope_head_dim: Count | None = None, qk_rope_head_dim: Count | None = None, v_head_dim: Count | None = None,
                 impl: Impl | None = None):
        # before super().__init__, which calls head_shapes
        self.kv_lora_rank = 4 * spec.head_dim if kv_lora_rank is None else kv_lora_rank
        self.q_lora_rank = q_lora_rank
        self.qk_nope_head_dim = spec.head_dim if qk_nope_head_dim is None else qk_nope_head_dim
        self.qk_rope_head_dim = 2 * max(1, spec.head_dim // 4) if qk_rope_head_dim is None else qk_rope_head_dim
        self.v_head_dim = spec.head_dim if v_head_dim is None else v_head_dim
        for name in WIDTHS:
            if (value := getattr(self, name)) is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"attention.{name}={value!r}: must be an integer of at least 1")
        _check(spec, self.qk_rope_head_dim)
        super().__init__(spec)
        self.impl = impl
        if spec.positions == "rotary":
            self.rope = spec.rope(self.qk_rope_head_dim)
        shapes = self.head_shapes()
        self.q_a_proj = self.q_a_layernorm = None
        if q_lora_rank is not None:
            self.q_a_proj = nn.Linear(spec.dim, q_lora_rank, bias=spec.bias)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=NORM_EPS)
            self.q_proj = nn.Linear(q_lora_rank, math.prod(shapes["q"]), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(spec.dim, self.kv_lora_rank + self.qk_rope_head_dim, bias=spec.bias)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, eps=NORM_EPS)
        self.k_proj, self.v_proj = (nn.Linear(self.kv_lora_rank, math.prod(shapes[name]), bias=False) for name in "kv")
        self.softmax_scale = shapes["q"][1] ** -0.5
        if spec.rope_scaling == "yarn":
            mscale = (spec.rope_options or {}).get("mscale_all_dim") or 0.0
            self.softmax_scale *= (0.1 * mscale * math.log(max(spec.rope_factor, 1.0)) + 1) ** 2

    def head_shapes(self) -> dict[str, tuple[int, int]]:
        """As in Attention; "k" is the part of the keys that `k_proj` makes, without the rotated part."""
        heads, kv_heads = self.spec.n_heads, self.spec.n_kv_heads
        return {"q": (heads, self.qk_nope_head_dim + self.qk_rope_head_dim), "k": (kv_heads, self.qk_nope_head_dim),
                "v": (kv_heads, self.v_head_dim), "out": (heads, self.v_head_dim)}

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return self.q_proj if self.q_a_proj is None else self.q_a_proj, self.kv_a_proj_with_mqa

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, the keys' rotated part (..., 1, qk_rope_head_dim) in place of k, and the latent (..., 1, kv_lora_rank) in place of v."""
        widths = self.projections[0].out_features, self.kv_lora_rank, self.qk_rope_head_dim
        q, latent, k_rope = self.product(x).split(widths, -1)
        if self.q_a_proj is not None:
            q = self.q_proj(self.q_a_layernorm(q))
        return q.unflatten(-1, self.head_shapes()["q"]), k_rope.unsqueeze(-2), self.kv_a_layernorm(latent).unsqueeze(-2)

    def apply_positions(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        if self.spec.positions != "rotary":
            return q, k
        cos, sin = self.rotary(seq)
        q_nope, q_rope = self._parts(q)
        return torch.cat((q_nope, rotate(q_rope, cos, sin)), -1), rotate(k, cos, sin)

    def _parts(self, q: Tensor) -> tuple[Tensor, ...]:
        return q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)

    def kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The latent concatenated with the keys' rotated part, (..., 1, kv_lora_rank + qk_rope_head_dim)."""
        return (torch.cat((v, k), -1),)

    def attend_over(self, q: Tensor, kept: Sequence[Tensor], seq: SequenceInfo) -> Tensor:
        latent, k_rope = kept[0].split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        shapes = self.head_shapes()
        k, v = (projection(latent.squeeze(-2)).unflatten(-1, shapes[name]) for name, projection in (("k", self.k_proj), ("v", self.v_proj)))
        return self.attend(q, torch.cat((k, k_rope.expand(*k.shape[:-1], -1)), -1), v, seq)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo) -> Tensor:
        return flash_attention(
            q, k, v, causal=self.spec.causal, softmax_scale=self.softmax_scale, dropout_p=self.dropout_p, cu_seqlens_q=seq.cu_seqlens,
            cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k, impl=self.impl)

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        new = q.shape[1]
        if new == cache.length or new > ABSORBED_TOKENS or self.dropout_p > 0:
            return super().attend_cached(q, cache, seq)
        return self._attend_absorbed(q, cache, self.cache_lengths(cache, seq))

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo) -> Tensor:
        return self._attend_absorbed(q, cache, cache.newest.lengths)

    def _attend_absorbed(self, q: Tensor, cache: KVCache, lengths: Tensor) -> Tensor:
        """`attend_over` for the newest tokens without computing any head's keys and values: k_proj is applied to the queries, and v_proj to
        the weighted sums of latents. lengths: int32 (batch,), tokens of each row of the cache."""
        shapes = self.head_shapes()
        kv_heads, _ = shapes["k"]
        w_k, w_v = (projection.weight.unflatten(0, shapes[name]) for name, projection in (("k", self.k_proj), ("v", self.v_proj)))
        q_nope, q_rope = self._parts(q)
        q_latent = torch.einsum("bikgd,kdc->bikgc", q_nope.unflatten(-2, (kv_heads, -1)), w_k).flatten(2, 3)
        q = torch.cat((q_latent, q_rope), -1)
        kernels = q.is_cuda and self.impl != "reference" and not (torch.is_grad_enabled() and q.requires_grad)
        if kernels and self.kv_lora_rank <= LATENT_WIDTHS[0] and self.qk_rope_head_dim <= LATENT_WIDTHS[1]:
            out = latent_decode_attention(q, cache.keys.squeeze(2), value_dim=self.kv_lora_rank, cache_seqlens=lengths, causal=True,
                                          softmax_scale=self.softmax_scale)
        else:
            keys = cache.keys if cache.newest is not None else cache.read()[0]
            out = attend_latents(q, keys.squeeze(2), self.kv_lora_rank, lengths, self.softmax_scale)
        return torch.einsum("bikgc,kdc->bikgd", out.unflatten(-2, (kv_heads, -1)), w_v).flatten(2, 3)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in WIDTHS)


def attend_latents(q: Tensor, keys: Tensor, value_dim: int, lengths: Tensor, softmax_scale: float) -> Tensor:
    """Causal softmax attention of the newest tokens to keys that all heads share, in plain PyTorch. Values are the keys' first channels.

    q: (batch, new tokens, heads, width). keys: (batch, max_len, width). lengths: int32 (batch,), tokens of each row, the new ones included.
    Returns (batch, new tokens, heads, value_dim). All scores are in memory at once; they are computed in q's dtype.
    """
    new, heads = q.shape[1:3]
    scores = (q.flatten(1, 2) @ keys.mT).unflatten(1, (new, heads))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * softmax_scale
    place = torch.arange(new, device=q.device) + (lengths[:, None] - new)
    seen = torch.arange(keys.shape[1], device=q.device) <= place[..., None]
    weights = scores.masked_fill(~seen[:, :, None], -torch.inf).softmax(-1).to(keys.dtype)
    return (weights.flatten(1, 2) @ keys[..., :value_dim]).unflatten(1, (new, heads))


def _check(spec: AttentionSpec, rotary: int) -> None:
    """Raises ValueError for options that do not go with the separate rotated part. rotary: its width."""
    if rotary % 2:
        raise ValueError(f"attention.qk_rope_head_dim={rotary}: must be even")
    if spec.qk_norm:
        raise ValueError("model.qk_norm=true: attention=mla has norms of the latents instead; set model.qk_norm=false, or attention=flash")
    if spec.partial_rotary_factor != 1:
        raise ValueError(f"model.partial_rotary_factor={spec.partial_rotary_factor}: must be 1 with attention=mla, where "
                         "attention.qk_rope_head_dim says how many channels are rotated")
    if spec.rope_scaling == "longrope":
        raise ValueError("model.rope_scaling=longrope: must be none, linear, ntk, dynamic, yarn or llama3 with attention=mla")
    if spec.rope_scaling in ("ntk", "dynamic") and rotary < 4:
        raise ValueError(f"attention.qk_rope_head_dim={rotary}: must be at least 4 with model.rope_scaling={spec.rope_scaling}")
