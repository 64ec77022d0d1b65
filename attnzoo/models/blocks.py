"""The parts of all models: norms, MLPs and the residual block."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo import fp8
from attnzoo.attention.base import Attention, KVCache, SequenceInfo
from attnzoo.attention.norm import RMSNorm
from attnzoo_kernels.add_norm import Stream, add_norm
from attnzoo_kernels.gelu import bias_gelu

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "gelu_tanh", "swiglu")


def make_norm(kind: str, dim: int, eps: float, bias: bool) -> nn.Module:
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps, bias=bias)
    if kind == "rmsnorm":
        return RMSNorm(dim, eps=eps)
    raise ValueError(f"norm={kind!r}: must be one of {', '.join(NORMS)}; set model.norm")


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), computed in the dtype of the norm's weights. Where x has 16 bits, casting the weights to x's dtype would lose more."""
    return norm(x.to(norm.weight.dtype))


def in_compute_dtype(x: Tensor) -> Tensor:
    """x in the dtype in which autocast computes matrix products. Without autocast x is returned unchanged."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Sum(NamedTuple):
    """The residual stream of pre-norm blocks, in two halves of 16 bits, and a branch output (..., dim) that is not added to it yet."""

    stream: Stream
    branch: Tensor | None = None

    def rows(self, rows: Tensor) -> "Sum":
        """The same for a subset of the tokens. rows: int64 (n,), their indices."""
        def of(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.flatten(0, -2).index_select(0, rows)

        return Sum(Stream(*map(of, self.stream)), of(self.branch))

    def normed(self, norm: nn.Module, last: bool = False, branch_bias: Tensor | None = None) -> tuple["Sum", Tensor]:
        """Adds the branch to the stream. Returns the sum, or None if `last` (nothing reads the sum again), and its norm."""
        kind, bias = ("rmsnorm", None) if isinstance(norm, RMSNorm) else ("layernorm", norm.bias)
        stream, y = add_norm(self.stream, self.branch, norm.weight, bias, branch_bias=branch_bias, eps=norm.eps, kind=kind, last=last)
        return None if last else Sum(stream), y


def default_mlp_dim(kind: str, dim: int) -> int:
    """4 dim, or 8/3 dim rounded up to a multiple of 8 for SwiGLU, whose third matrix makes the number of parameters about equal."""
    return 4 * dim if kind != "swiglu" else -(-8 * dim // 24) * 8


class MLP(nn.Module):
    """down(gelu(up x)) with the exact or the tanh GELU, or down(silu(gate x) * up x) (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

    joins_gelu = False  # whether the product of `up_proj` itself adds its bias and applies the tanh GELU, as cuBLAS can; without gradients

    def __init__(self, kind: str, dim: int, hidden: int, bias: bool):
        super().__init__()
        if kind not in MLPS:
            raise ValueError(f"mlp={kind!r}: must be one of {', '.join(MLPS)}; set model.mlp")
        self.kind = kind
        self.gate_proj = nn.Linear(dim, hidden, bias=bias) if kind == "swiglu" else None
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        """add_bias: whether `down_proj` adds its bias. If not, the caller adds it."""
        x = self.hidden(x)
        return self.down_proj(x) if add_bias else fp8.without_bias(self.down_proj, x)

    def hidden(self, x: Tensor) -> Tensor:
        """The input of `down_proj`."""
        if self.kind == "swiglu":
            return F.silu(self.gate_proj(x)) * self.up_proj(x)
        if self.joins_gelu:
            up = torch._addmm_activation(self.up_proj.bias, x.flatten(0, -2), self.up_proj.weight.t(), use_gelu=True)
            return up.unflatten(0, x.shape[:-1])
        approximate = "tanh" if self.kind == "gelu_tanh" else "none"
        product = fp8.product_of(self.up_proj)
        # torch.compile fuses F.gelu with the rounding of its result to 8 bits; it cannot fuse a custom operator such as bias_gelu
        if x.is_cuda and x.dtype != torch.float64 and not (product is fp8.linear and torch.compiler.is_compiling()):
            # one kernel adds the bias and applies GELU; its backward also sums the bias gradient
            return bias_gelu(product(x, self.up_proj.weight), self.up_proj.bias, approximate=approximate)
        return F.gelu(self.up_proj(x), approximate=approximate)


class Block(nn.Module):
    """Attention and MLP, each with a residual connection. The norm is applied to the input of each ("pre") or to each sum ("post")."""

    def __init__(self, attention: Attention, *, dim: int, mlp: str, mlp_dim: int, norm: str, norm_eps: float, norm_position: str,
                 bias: bool, dropout: float):
        super().__init__()
        if norm_position not in ("pre", "post"):
            raise ValueError(f"norm_position={norm_position!r}: must be pre or post; set model.norm_position")
        self.pre_norm = norm_position == "pre"
        self.attention = attention
        self.attention_norm = make_norm(norm, dim, norm_eps, bias)
        self.mlp = MLP(mlp, dim, attention.mlp_dim(mlp_dim), bias)
        self.mlp_norm = make_norm(norm, dim, norm_eps, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor | Sum, seq: SequenceInfo, cache: KVCache | None = None, rows: Tensor | None = None) -> Tensor | Sum:
        """x: (..., dim). The result has the same shape and type (Tensor or Sum).

        rows: int64 (n,), indices of tokens. Only these tokens go through the MLP, and the result is (n, dim).
        """
        if isinstance(x, Sum):
            x, y = x.normed(self.attention_norm)
            x = Sum(x.stream, self.dropout(self.attention(y, seq, cache)))
            x, y = (x if rows is None else x.rows(rows)).normed(self.mlp_norm)
            return Sum(x.stream, self.dropout(self.mlp(y)))
        if rows is None and self.norms_sums(x):
            # the norms' kernels also sum the gradients of the biases before them
            x = Sum(Stream(x), self.attention(x, seq, cache, add_bias=False)).normed(
                self.attention_norm, last=True, branch_bias=self.attention.o_proj.bias)[1]
            return Sum(Stream(x), self.mlp(x, add_bias=False)).normed(self.mlp_norm, last=True, branch_bias=self.mlp.down_proj.bias)[1]
        x = x + self.dropout(self.attention(normed(self.attention_norm, x) if self.pre_norm else x, seq, cache))
        if rows is not None:
            x = x.flatten(0, -2).index_select(0, rows)
        if self.pre_norm:
            return x + self.dropout(self.mlp(normed(self.mlp_norm, x)))
        # under autocast norms return float32; the next norm rescales the values anyway, so 16 bits suffice and take half the memory
        x = in_compute_dtype(self.attention_norm(x))
        return in_compute_dtype(self.mlp_norm(x + self.dropout(self.mlp(x))))

    def norms_sums(self, x: Tensor) -> bool:
        """Whether this post-norm block adds and normalises by one kernel. Without gradients, torch.compile's own kernels are as fast."""
        drops = self.training and self.dropout.p > 0
        return not self.pre_norm and x.is_cuda and x.dtype == torch.bfloat16 and torch.is_grad_enabled() and not drops
