"""Differential attention: the difference of two softmax maps cancels the noise that they share (Ye et al. 2024, arXiv:2410.05258).

Runs on `attnzoo_kernels.differential_attention`, one kernel for both maps. Version 2 is from microsoft/unilm, Diff-Transformer-V2 (2026).
"""

import logging
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec, Impl, KVCache, SequenceInfo, Supports
from attnzoo_kernels import decode_attention, differential_attention

LAMBDA_STD = 0.1
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")

log = logging.getLogger(__name__)


class DifferentialAttention(Attention):
    """(softmax(q1 k1ᵀ) - lambda softmax(q2 k2ᵀ)) v, where query heads 2h and 2h + 1 are pair h and give one output head.

    version 1: half as many output heads as the baseline has heads, with values twice as wide. The parameters are the baseline's, plus the
        vectors of lambda and the norm's weight. One lambda for all heads of a layer:
        lambda = exp(lambda_q1 · lambda_k1) - exp(lambda_q2 · lambda_k2) + lambda_init, with lambda_init = 0.8 - 0.6 exp(-0.3 layer).
        Each head's output goes through an RMSNorm, whose weight all heads share, and is scaled by 1 - lambda_init. n_heads and n_kv_heads
        must be even. Key pair g and value head g serve a contiguous group of query pairs.
    version 2: as many output heads as the baseline and twice as many query heads; both queries of a pair read the same keys.
        lambda = sigmoid(x W) per token and head, without a norm and without lambda_init.

    norm: false leaves out version 1's norm; the factor 1 - lambda_init stays. norm_eps: the norm's eps.
    match_parameters: make the MLP narrower, by a multiple of 8, so that a block has about as many parameters as the baseline's; both
        counts are logged.
    impl: the operator's implementation ("gluon", "triton", "cpu", "reference"), None for the fastest that runs.
    """

    supports = Supports(positions=("learned", "rotary", "none"), dropout=False, context_parallel=("dense", "packed"))
    decodes_on_device = True

    def __init__(self, spec: AttentionSpec, *, version: int = 1, norm: bool = True, norm_eps: float = 1e-5, match_parameters: bool = False,
                 impl: Impl | None = None):
        if version not in (1, 2):
            raise ValueError(f"attention.version={version!r}: must be 1 or 2")
        for name, heads in (("n_heads", spec.n_heads), ("n_kv_heads", spec.n_kv_heads)):
            if version == 1 and heads % 2:
                raise ValueError(f"{name}={heads}: attention=differential pairs heads and needs an even number of them; "
                                 f"set model.{name}, or attention.version=2")
        self.version = version
        super().__init__(spec)
        self.norm, self.match_parameters, self.impl = norm, match_parameters, impl
        self.fixed_lambda: Tensor | None = None
        if version == 1:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * spec.layer)
            for name in LAMBDA_VECTORS:
                self.register_parameter(name, nn.Parameter(torch.randn(spec.head_dim) * LAMBDA_STD))
            self.head_norm = nn.RMSNorm(2 * spec.head_dim, eps=norm_eps) if norm else nn.Identity()
        else:
            self.lambda_proj = nn.Linear(spec.dim, spec.n_heads, bias=False)
            # what metrics() reports: the mean over the tokens of the last training step
            self.register_buffer("mean_lambda", torch.full((), math.nan), persistent=False)

    def head_shapes(self) -> dict[str, tuple[int, int]]:
        heads, kv_heads, width = self.spec.n_heads, self.spec.n_kv_heads, self.spec.head_dim
        if self.version == 1:
            return {"q": (heads, width), "k": (kv_heads, width), "v": (kv_heads // 2, 2 * width), "out": (heads // 2, 2 * width)}
        return {"q": (2 * heads, width), "k": (kv_heads, width), "v": (kv_heads, width), "out": (heads, width)}

    def init_weights(self, std: float, residual_std: float) -> None:
        super().init_weights(std, residual_std)
        if self.version == 1:
            for name in LAMBDA_VECTORS:
                nn.init.normal_(getattr(self, name), std=LAMBDA_STD)
            if self.norm:
                nn.init.ones_(self.head_norm.weight)
        else:
            nn.init.normal_(self.lambda_proj.weight, std=std)

    def lambda_of_layer(self) -> Tensor:
        """Version 1's lambda, (), in at least float32."""
        if self.fixed_lambda is not None:
            return self.fixed_lambda
        q1, k1, q2, k2 = (_at_least_float32(getattr(self, name)) for name in LAMBDA_VECTORS)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init

    def prepare_to_decode(self) -> None:
        if self.version == 1:
            self.fixed_lambda = self.lambda_of_layer()

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.version == 1:
            return super().project(x)
        lam = _at_least_float32(self.lambda_proj(x)).sigmoid()
        if self.training:
            with torch.no_grad():
                self.mean_lambda.copy_(lam.mean())
        return *super().project(x), lam

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, *lam: Tensor) -> Tensor:
        k1, k2 = (k[..., 0::2, :], k[..., 1::2, :]) if self.version == 1 else (k, None)
        return differential_attention(
            q[..., 0::2, :], q[..., 1::2, :], k1, k2, v, self.lambda_of_layer() if self.version == 1 else lam[0], causal=self.spec.causal,
            cu_seqlens_q=seq.cu_seqlens, cu_seqlens_k=seq.cu_seqlens_k, max_seqlen_q=seq.max_seqlen, max_seqlen_k=seq.max_seqlen_k,
            impl=self.impl)

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *lam: Tensor) -> Tensor:
        if not self.decodes_by_kernel(q):
            return super().attend_cached(q, cache, seq, *lam)
        return self._decode(q, cache, seq, self.cache_lengths(cache, seq), *lam)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *lam: Tensor) -> Tensor:
        return self._decode(q, cache, seq, cache.newest.lengths, *lam)

    def _decode(self, q: Tensor, cache: KVCache, seq: SequenceInfo, lengths: Tensor, *lam: Tensor) -> Tensor:
        """Both maps as heads of one `decode_attention` call, which reads the cache once. lengths: int32 (batch,), tokens of each row."""
        keys, factor, width = cache.keys, self.lambda_of_layer() if self.version == 1 else lam[0][..., None], q.shape[-1]
        if self.version == 1:
            # a pair's two keys become one key of twice the width; each query is zero in the half of the other key
            keys = keys.unflatten(2, (-1, 2)).flatten(3)
            halves = seq.once(("differential halves", q.dtype), lambda: torch.eye(2, dtype=q.dtype, device=q.device)[..., None])
            # (..., pairs, maps, halves, width)
            q = (q.unflatten(2, (-1, 2))[..., None, :] * halves).flatten(4).flatten(2, 3)
        out = decode_attention(
            q, keys, cache.values, cache_seqlens=lengths, causal=True, softmax_scale=width**-0.5,
            out_dtype=None if q.dtype == torch.float64 else torch.float32, impl="reference" if self.impl == "reference" else None)
        first, second = out.unflatten(2, (-1, 2)).unbind(3)
        return torch.addcmul(first, factor, second, value=-1).to(q.dtype)

    def finish(self, out: Tensor) -> Tensor:
        if self.version == 2:
            return out
        if self.norm:
            # PyTorch's fused norm needs input and weight of one dtype; under autocast the output has 16 bits and the weight 32
            out = F.rms_norm(out, self.head_norm.normalized_shape, self.head_norm.weight.to(out.dtype), self.head_norm.eps)
        return out * (1 - self.lambda_init)

    def mlp_dim(self, baseline: int) -> int:
        spec = self.spec
        # parameters per hidden unit: its weights and, with biases, one bias in each matrix but the last
        unit = spec.mlp_matrices * spec.dim + (spec.mlp_matrices - 1) * spec.bias
        ours = sum(p.numel() for p in self.parameters())
        heads, kv_heads = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        gates = {"none": 0, "elementwise": heads, "head": spec.n_heads}[spec.gate]
        theirs = spec.dim * (2 * heads + 2 * kv_heads + gates) + spec.bias * (heads + 2 * kv_heads + gates + spec.dim)
        width = baseline
        if self.match_parameters:
            width = baseline - 8 * round((ours - theirs) / (8 * unit))
            if width < 1:
                raise ValueError(f"attention.match_parameters=true: the MLP of width {baseline} cannot make up for {ours - theirs} more "
                                 "parameters in attention; set model.mlp_dim higher or attention.match_parameters=false")
        if spec.layer == 0 and not next(self.parameters()).is_meta:  # a run first checks its settings with a model on the meta device
            log.info(f"attention=differential, version {self.version}: {ours + unit * width} parameters in attention and MLP of a layer "
                     f"(MLP width {width}), the baseline has {theirs + unit * baseline} (MLP width {baseline})")
        return width

    def flops(self, lengths: list[int]) -> float:
        extra = self.lambda_proj.weight.numel() if self.version == 2 else 0
        return super().flops(lengths) + 6.0 * extra * sum(lengths)

    def metrics(self) -> dict[str, float]:
        """lambda: version 2's is the mean over heads and tokens of the last training step."""
        return super().metrics() | {"lambda": (self.lambda_of_layer() if self.version == 1 else self.mean_lambda).item()}


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def load_unilm(layer: DifferentialAttention, state: Mapping[str, Tensor]) -> None:
    """Copy the weights of unilm's MultiheadFlashDiff1 or 2 (version 1) or MultiheadFlashDiffV2 into a layer.

    Their heads are paired like ours. Their rotary embedding pairs neighbouring channels, ours pairs c with c + head_dim / 2.
    """
    heads = layer.head_shapes()
    width = layer.spec.head_dim
    channels = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))
    new = dict(state)
    for name in ("q", "k"):
        key = f"{name}_proj.weight"
        new[key] = state[key].unflatten(0, heads[name])[:, channels].flatten(0, 1)
    for theirs, ours in (("out_proj.weight", "o_proj.weight"), ("subln.weight", "head_norm.weight")):
        if theirs in new:
            new[ours] = new.pop(theirs)
    if layer.version == 1 and layer.norm:
        new.setdefault("head_norm.weight", torch.ones_like(layer.head_norm.weight))
    layer.load_state_dict(new)


def load_diffllama(layer: DifferentialAttention, state: Mapping[str, Tensor]) -> None:
    """Copy the weights of a DiffLlamaAttention of transformers into a layer of version 1 with norm_eps = its config's rms_norm_eps.

    DiffLlama pairs head h with h + n_heads / 2, also for keys and values, and its norm has no weight.
    """
    if layer.version != 1 or not layer.norm:
        raise ValueError(f"layer: must be of version 1 with its norm, got version {layer.version}, norm={layer.norm}")
    heads = {"q": layer.spec.n_heads, "k": layer.spec.n_kv_heads, "v": layer.spec.n_kv_heads}
    new = {}
    for key, value in state.items():
        module = key.partition("_proj")[0]
        # (2 halves, pairs, head_dim, ...) to (pairs, 2, head_dim, ...)
        new[key] = value.unflatten(0, (2, heads[module] // 2, -1)).transpose(0, 1).flatten(0, 2) if module in heads else value
    layer.load_state_dict({"head_norm.weight": torch.ones_like(layer.head_norm.weight)} | new)
