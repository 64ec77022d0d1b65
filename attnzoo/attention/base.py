"""The base of all attention layers: `AttentionSpec` describes a layer, `Attention` is the class that each variant extends by `attend`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo import fp8
from attnzoo.attention import joint
from attnzoo.attention.cache import DECODED_TOKENS, KVCache
from attnzoo.attention.context import attend_in_context
from attnzoo.attention.norm import RMSNorm
from attnzoo.attention.positions import ROPE_OPTIONS, ROPE_SCALINGS, Rope, alibi_slopes, make_rope, rotate
from attnzoo.attention.sequence import SequenceInfo
from attnzoo.attention.supports import POSITIONS, Supports, check_context_parallel
from attnzoo.attention.temperature import make_temperature

GATES = ("none", "elementwise", "head")
Impl = Literal["gluon", "triton", "cpu", "reference"]  # an implementation of an operator; None takes the fastest that runs


@dataclass(frozen=True)
class AttentionSpec:
    """The description that an attention layer is built from.

    n_heads: the baseline's number of heads. A variant that pairs or doubles heads derives its own number from it.
    layer: this layer's index, from 0 to n_layers - 1. train_context: the sequence length in training, in tokens.
    positions: with "learned" the model adds position embeddings, and the layer does nothing; "rotary" and "alibi" are applied in the
        layer; with "none" only the causal mask gives an order (Kazemnejad et al. 2023, arXiv:2305.19466).
    rope_base, rope_scaling, rope_factor, rope_options: see `attnzoo.attention.positions`. partial_rotary_factor: the fraction of a head's
        channels that is rotated, starting with the first. rope_proportion: the fraction of the rotated pairs of channels that has a
        frequency above zero, starting with the fastest pair.
    qk_norm: queries and keys are normalised per head (RMSNorm with norm_eps, Henry et al. 2020, arXiv:2010.04245) before the rotation.
    temperature: a factor of the queries, see `attnzoo.attention.temperature.make_temperature`.
    gate: the output is multiplied by sigmoid(x W), with one gate per channel ("elementwise") or per head ("head") (Qiu et al. 2025,
        arXiv:2505.06708).
    original_context: the context length, in tokens, that the positions were trained on before it was extended; None for train_context.
    mlp_matrices: number of dim x mlp_dim matrices in the MLP that follows the layer: two, or three if the MLP has a gate.
    """

    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layer: int
    n_layers: int
    causal: bool
    positions: str
    train_context: int
    dropout: float = 0.0
    bias: bool = False
    rope_base: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_options: Mapping[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    rope_proportion: float = 1.0
    original_context: int | None = None
    qk_norm: bool = False
    norm_eps: float = 1e-5
    temperature: str | Mapping[str, Any] = "none"
    gate: str = "none"
    mlp_matrices: int = 2

    def __post_init__(self):
        for name in ("dim", "n_heads", "n_kv_heads", "head_dim", "n_layers", "train_context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: must be a positive integer, got {value!r}")
        if self.original_context is not None and (not isinstance(self.original_context, int) or self.original_context < 1):
            raise ValueError(f"original_context={self.original_context!r}: must be a positive integer, or null for the training context")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads}: must divide n_heads={self.n_heads}; set model.n_kv_heads or model.n_heads")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r}: must be one of {', '.join(POSITIONS)}; set model.positions")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"attention_dropout={self.dropout}: must lie in [0, 1)")
        if self.gate not in GATES:
            raise ValueError(f"attention_gate={self.gate!r}: must be one of {', '.join(GATES)}; set model.attention_gate")
        make_temperature(self.temperature, self.known_context)
        if self.positions == "rotary":
            self._check_rotary()
        elif self.rope_scaling != "none":
            raise ValueError(f"rope_scaling={self.rope_scaling}: has no effect with positions={self.positions}; set model.positions=rotary "
                             "or model.rope_scaling=none")

    @property
    def known_context(self) -> int:
        """The context length, in tokens, that the positions were trained on."""
        return self.original_context or self.train_context

    def rope(self, head_dim: int) -> Rope:
        """The rotary embedding for heads with `head_dim` channels."""
        options = ((name, tuple(value) if isinstance(value, list) else value) for name, value in (self.rope_options or {}).items())
        return make_rope(self._rotary_dim(head_dim), float(self.rope_base), self.rope_scaling, float(self.rope_factor), self.known_context,
                         tuple(sorted(options)), float(self.rope_proportion))

    def _rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)

    def _check_rotary(self):
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even one; set model.head_dim or model.positions=alibi")
        if not 0 < self.partial_rotary_factor <= 1 or self._rotary_dim(self.head_dim) % 2 or self._rotary_dim(self.head_dim) < 2:
            raise ValueError(f"partial_rotary_factor={self.partial_rotary_factor}: must lie in (0, 1] and leave an even number of the "
                             f"{self.head_dim} channels of a head; no rotation at all is model.positions=none")
        if not 0 < self.rope_proportion <= 1 or int(self.rope_proportion * self._rotary_dim(self.head_dim) / 2) < 1:
            raise ValueError(f"rope_proportion={self.rope_proportion}: must lie in (0, 1] and let one pair of channels turn at least; no "
                             "rotation at all is model.positions=none")
        if self.rope_scaling not in ROPE_SCALINGS:
            raise ValueError(f"rope_scaling={self.rope_scaling!r}: must be one of {', '.join(ROPE_SCALINGS)}")
        if not self.rope_factor > 0 or not self.rope_base > 0:
            raise ValueError(f"rope_factor={self.rope_factor}, rope_base={self.rope_base}: must be positive")
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ValueError(f"rope_factor={self.rope_factor}: has no effect with rope_scaling=none; set model.rope_scaling=linear or ntk")
        if self.rope_scaling not in ("none", "longrope") and self.rope_factor == 1:
            raise ValueError(f"rope_scaling={self.rope_scaling}: has no effect with rope_factor=1; set model.rope_factor, or "
                             "model.rope_scaling=none")
        if self.rope_scaling in ("ntk", "dynamic") and self._rotary_dim(self.head_dim) < 4:
            raise ValueError(f"head_dim={self.head_dim}: rope_scaling={self.rope_scaling} needs at least 4 rotated channels; set "
                             "model.rope_scaling=linear")
        known = ROPE_OPTIONS.get(self.rope_scaling, ())
        if unknown := (self.rope_options or {}).keys() - set(known):
            raise ValueError(f"rope_options: {', '.join(sorted(unknown))} must be {', '.join(known) or 'left out'} with "
                             f"rope_scaling={self.rope_scaling}")
        self.rope(self.head_dim)


class Attention(nn.Module):
    """Base of all variants: projections, rotary positions and the KV cache. A variant overrides `attend` and, where it needs to:

    - `head_shapes`: other numbers or widths of heads;
    - `project`, `projections`: inputs of `attend` beside q, k and v that are computed from x, or other projection matrices;
    - `inputs`: inputs of `attend` that also depend on earlier tokens;
    - `apply_positions`: queries and keys that are not rotated, or rotated in another way;
    - `kept`, `attend_over`, `attend_cached`, `attend_newest`: a cache that holds more than keys and values, or a separate kernel for the
      newest tokens over the cache;
    - `finish`: a norm or a factor on the output of `attend`, because `attend` itself must return weights times values;
    - `init_weights`, `mlp_dim`, `visible_pairs`, `metrics`, `plain`, `check_context_parallel`, `check_trees`.

    All variants have the parameters `q_proj`, `k_proj`, `v_proj` and `o_proj`, and `q_norm`, `k_norm`, `g_proj` and `ssmax_scale` where the
    spec asks for them. A checkpoint of one variant therefore loads into another.
    """

    supports = Supports()
    extends_context = False  # True: designed to read beyond spec.known_context, which training on longer sequences must then keep
    drawn_with = ""  # the options that `attend` needs to return weights times values, which a picture needs; empty: any options do
    decodes_on_device = False  # True: `attend_newest` works, so decoding can be a CUDA graph; `attend` must then respect seq.cu_seqlens_k
    reads_pages = False  # True: `attend_newest` reads the cache by its block_table
    page = 1  # tokens in one page of the cache, as `attend_newest` reads it; decoding makes the cache's max_len a multiple of it
    merges_chunks = True  # False: in packed sequences `attend` lets one have fewer queries than keys, so that it takes one chunk at a time
    divides_heads = False  # True: nothing in `attend` is per head but its tensors, so that it can run on one group of heads at a time
    joined: tuple[Tensor, Tensor | None] | None = None  # the concatenated weight and bias of `projections`; decoding concatenates them once

    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.spec = spec
        self.check_supported(spec.causal, spec.positions, spec.dropout)
        widths = {name: heads * width for name, (heads, width) in self.head_shapes().items()}
        self.q_proj = nn.Linear(spec.dim, widths["q"], bias=spec.bias)
        self.k_proj = nn.Linear(spec.dim, widths["k"], bias=spec.bias)
        self.v_proj = nn.Linear(spec.dim, widths["v"], bias=spec.bias)
        self.o_proj = nn.Linear(widths["out"], spec.dim, bias=spec.bias)
        width = self.head_shapes()["q"][1]
        self.q_norm, self.k_norm = (RMSNorm(width, eps=spec.norm_eps) if spec.qk_norm else nn.Identity() for _ in range(2))
        self.rope = spec.rope(width) if spec.positions == "rotary" else None
        out_heads, out_width = self.head_shapes()["out"]
        gates = {"none": 0, "elementwise": out_heads * out_width, "head": out_heads}[spec.gate]
        self.g_proj = nn.Linear(spec.dim, gates, bias=spec.bias) if gates else None
        self.temperature = make_temperature(spec.temperature, spec.known_context)
        self.ssmax_scale = None
        if self.temperature is not None and self.temperature.kind == "ssmax":
            # initialised so that the factor's mean over the trained context is one
            self.ssmax_scale = nn.Parameter(torch.full((self.head_shapes()["q"][0],), 1 / self.temperature.mean_log))

    @property
    def name(self) -> str:
        """The variant's name on the command line, which is its module's name."""
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    def check_supported(cls, causal: bool, positions: str, dropout: float) -> None:
        """Raises ValueError for a model that `supports` excludes."""
        supports, name = cls.supports, cls.__module__.rpartition(".")[2]
        if causal and not supports.causal:
            raise ValueError(f"attention={name} is bidirectional only; use a bert model or attention=flash")
        if not causal and not supports.bidirectional:
            raise ValueError(f"attention={name} is causal only; use a gpt model or attention=flash")
        if positions not in supports.positions:
            ways = " or ".join(f"model.positions={way}" for way in supports.positions)
            raise ValueError(f"attention={name} does not support positions={positions}; set {ways}, or attention=flash")
        if dropout > 0 and not supports.dropout:
            raise ValueError(f"attention={name} has no attention dropout, got {dropout}; set model.attention_dropout=0")

    @classmethod
    def check_packed(cls, causal: bool, trees: bool = False) -> None:
        """Raises ValueError where the variant takes no packed sequences or, if `trees`, no trees of shared prefixes.

        Padded input counts as packed, because a model packs it.
        """
        name = cls.__module__.rpartition(".")[2]
        if not cls.supports.packed:
            way_out = "set data.cross_documents=true" if causal else "a bidirectional model packs what is padded; use a gpt model"
            raise ValueError(f"attention={name} takes no packed sequences; {way_out}, or attention=flash")
        if trees and not causal:
            raise ValueError("parents: trees of shared prefixes are for causal models; use a gpt model, or packed sequences")
        if trees and not cls.supports.trees:
            raise ValueError(f"attention={name} takes no trees of shared prefixes; set data.trees=false, or attention=flash")

    def check_trees(self) -> None:
        """Raises ValueError where the layer, as configured, takes no trees of shared prefixes."""
        self.check_packed(self.spec.causal, trees=True)

    def check_context_parallel(self, packed: bool) -> None:
        """Raises ValueError where the layer does not work with context parallelism. packed: whether the sequences are packed."""
        check_context_parallel(self, packed)

    def head_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, width) of the projected "q", "k", "v" and of `attend`'s output "out"."""
        spec = self.spec
        queries, keys = (spec.n_heads, spec.head_dim), (spec.n_kv_heads, spec.head_dim)
        return {"q": queries, "k": keys, "v": keys, "out": queries}

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections that `project` applies to x as one matrix product."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def matrices(self) -> list[nn.Linear]:
        """All linear layers of this layer, each once."""
        found = (*self.projections, self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.g_proj)
        return [*dict.fromkeys(filter(None, found))]

    @property
    def in_float32(self) -> tuple[nn.Module, ...]:
        """The modules that compute in float32 even under autocast. Decoding does not cast their weights."""
        return ()

    def init_weights(self, std: float, residual_std: float) -> None:
        """Normal weights, zero biases; `residual_std` is for the projection that writes to the residual stream."""
        for projection in self.matrices:
            nn.init.normal_(projection.weight, std=residual_std if projection is self.o_proj else std)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def mlp_dim(self, baseline: int) -> int:
        """Width of the MLP that follows this layer. A variant with more parameters than the baseline may make it narrower."""
        return baseline

    def prepare_to_decode(self) -> None:
        """Computes once what is the same for all tokens. Only a copy of a layer that does nothing but decode is prepared."""

    def forward(self, x: Tensor, seq: SequenceInfo, cache: KVCache | None = None, add_bias: bool = True) -> Tensor:
        """x: (batch, seqlen, dim) or packed (total, dim); with `cache` only the new tokens. Returns x's shape.

        add_bias: whether `o_proj` adds its bias. If not, the caller adds it.
        """
        if seq.parents is not None:
            self.check_trees()
        elif seq.cu_seqlens is not None:
            self.check_packed(self.spec.causal)
        q, k, v, *rest = self.inputs(x, seq, cache)
        q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None and cache.newest is not None:
            q = self._append_newest(q, k, v, cache, seq, *rest)
            out = self.attend_newest(self.temper(q, seq), cache, seq, *rest)
        else:
            q, k = self.apply_positions(q, k, seq)
            q = self.temper(q, seq)
            kept = self.kept(k, v, *rest)
            if seq.context is not None:
                out = attend_in_context(self, q, kept, seq, *rest)
            elif cache is None:
                out = self.attend_over(q, kept, seq, *rest)
            else:
                cache.append(*kept)
                out = self.attend_cached(q, cache, seq, *rest)
        out = self.finish(out)
        if self.g_proj is not None:
            gate = self.g_proj(x).sigmoid()
            out = out * (gate.view_as(out) if self.spec.gate == "elementwise" else gate[..., None])
        out = out.flatten(-2)
        return self.o_proj(out) if add_bias else fp8.without_bias(self.o_proj, out)

    def _append_newest(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """Applies positions, appends what `kept` returns to the cache, and returns the queries, as `attend_newest` takes them."""
        if type(self).apply_positions is Attention.apply_positions and type(self).kept is Attention.kept:
            return self._append_rotated(q, k, v, None if self.rope is None else self.rotary(seq), cache)
        q, k = self.apply_positions(q, k, seq)
        cache.append(*self.kept(k, v, *rest))
        return q

    @staticmethod
    def _append_rotated(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor] | None, cache: KVCache) -> Tensor:
        """Appends rotated keys, and values. Returns rotated queries, (batch, n, heads, width). On a GPU one kernel does all.

        tables: cos and sin, (batch or 1, n, rotated channels / 2). Queries are rotated by each of the n, keys by the last one. None:
        nothing is rotated, and n is 1.
        """
        cos, sin = tables or (None, None)
        if q.is_cuda and q.dtype == cache.keys.dtype != torch.float64:
            from attnzoo_kernels.decode.append import append_rotated

            return append_rotated(q, k, v, cos, sin, cache.keys, cache.values, cache.newest.places)
        if tables is not None:
            q, k = rotate(q.expand(-1, cos.shape[1], -1, -1), cos, sin), rotate(k, cos[:, -1:], sin[:, -1:])
        cache.append(k, v)
        return q

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each (..., heads, width), followed by the arguments that `attend` takes after `seq`."""
        shapes = self.head_shapes()
        parts = self.product(x).split([p.out_features for p in self.projections], dim=-1)
        return tuple(part.unflatten(-1, shapes[name]) for name, part in zip("qkv", parts, strict=True))

    def product(self, x: Tensor) -> Tensor:
        """The outputs of all `projections` of x, concatenated along the last dimension."""
        return joint.product(x, self.projections) if self.joined is None else F.linear(x, *self.joined)

    def _apply(self, fn: Callable, recurse: bool = True) -> "Attention":
        """Called by `to`, `cuda` and `float`, which move each parameter to memory of its own. The projections are then laid side by side
        again, see `attnzoo.attention.joint`."""
        super()._apply(fn, recurse)
        joint.lay_side_by_side(self.projections)
        return self

    def inputs(self, x: Tensor, seq: SequenceInfo, cache: KVCache | None) -> tuple[Tensor, ...]:
        """The result of `project` for the new tokens. A variant may override it where inputs also depend on earlier tokens."""
        return self.project(x)

    def apply_positions(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """Queries and keys of the new tokens with their positions, as `attend` and the cache receive them."""
        if self.spec.positions != "rotary":
            return q, k
        cos, sin = self.rotary(seq)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def temper(self, q: Tensor, seq: SequenceInfo) -> Tensor:
        """Queries (..., heads, width) times the temperature factors of their positions. This multiplies the logits by the same factors."""
        if self.temperature is None:
            return q
        factor = seq.once(self.temperature.key, lambda: self.temperature.factor(seq.context_lengths(self.spec.causal)))[..., None]
        if self.ssmax_scale is not None:
            factor = factor * self.ssmax_scale
        return (q * factor[..., None].to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)

    def rotary(self, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """cos and sin for the tokens of this forward pass, each float32 (*position_ids.shape, rotated channels / 2)."""
        return seq.once(self.rope.key, lambda: self.rope.tables(seq.position_ids))

    def alibi_slopes(self, seq: SequenceInfo, n_heads: int, device: torch.device) -> Tensor | None:
        """ALiBi's slopes, float32 (n_heads,), or None with other positions."""
        if self.spec.positions != "alibi":
            return None
        return seq.once(("alibi", n_heads), lambda: alibi_slopes(n_heads, device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """Attention itself: q (..., heads, width) of the new tokens, k and v of all tokens. Returns (..., heads, width) as `head_shapes`
        gives them for "out".

        With a cache k and v hold more tokens than q; the queries then belong to the last tokens.
        """
        raise NotImplementedError

    def kept(self, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the new tokens that go into a cache, each (batch, new tokens, ...): keys, values, and whatever other tensors of
        earlier tokens a variant needs."""
        return k, v

    def attend_over(self, q: Tensor, kept: Sequence[Tensor], seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """`attend` of the last tokens over all tokens. kept: the `kept` tensors of all tokens. q, rest: those of the last tokens."""
        return self.attend(q, *kept, seq, *rest)

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """`attend_over` for the newest tokens over the cache, which already contains them."""
        return self.attend_over(q, cache.read(), seq, *rest)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """Like `attend_cached`, for one new token per row, (batch, 1, ...), whose position only the device knows (`cache.newest`).

        This default reads the cache's rows as packed sequences.
        """
        q, k, v, *rest = (x.flatten(0, 1) for x in (q, *cache.buffers, *rest))
        return self.attend(q, k, v, self.newest_rows(cache, seq), *rest)[:, None]

    @staticmethod
    def newest_rows(cache: KVCache, seq: SequenceInfo) -> SequenceInfo:
        """The newest token of each row, and the cache's rows, as packed sequences (`Newest.packed`)."""
        def made() -> SequenceInfo:
            queries, keys = cache.newest.packed()
            return SequenceInfo(cache.newest.positions, queries, 1, keys=(keys, cache.max_len))

        return seq.once("newest rows", made)

    def decodes_by_kernel(self, q: Tensor) -> bool:
        """Whether `attend_cached` of a variant with an `impl` uses the kernel `decode_attention`."""
        differentiable = torch.is_grad_enabled() and q.requires_grad
        return q.is_cuda and self.impl != "reference" and not differentiable and self.dropout_p == 0 and q.shape[1] <= DECODED_TOKENS

    @staticmethod
    def cache_lengths(cache: KVCache, seq: SequenceInfo) -> Tensor:
        """The number of tokens in each row of the cache, int32 (batch,). The buffers' shapes give only the capacity."""
        return seq.once("cache lengths", lambda: torch.full((cache.batch,), cache.length, dtype=torch.int32, device=cache.keys.device))

    def finish(self, out: Tensor) -> Tensor:
        """Applied per token to the output of `attend`, (..., heads, width); for example a norm."""
        return out

    @property
    def keys_before(self) -> int:
        """The largest number of keys before its own that a query sees; -1 is unlimited."""
        return -1

    @property
    def dropout_p(self) -> float:
        return self.spec.dropout if self.training else 0.0

    @property
    def plain(self) -> bool:
        """Whether the layer, as configured, computes ordinary softmax attention over all tokens (all earlier ones in a causal model)."""
        return False

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_len` tokens."""
        if not (self.supports.cache and self.spec.causal):
            reason = "has no KV cache" if self.spec.causal else "is bidirectional here, which allows no KV cache"
            raise ValueError(f"attention={self.name} {reason}; read the whole sequence at once instead")
        return KVCache(batch, max_len)

    def visible_pairs(self, length: int) -> int:
        """The number of pairs of a query and a key that the query sees, in one sequence of this length."""
        return length * (length + 1) // 2 if self.spec.causal else length * length

    def flops(self, lengths: list[int]) -> float:
        """Floating point operations of forward and backward over sequences of these lengths. The backward counts as two forwards."""
        shapes = self.head_shapes()
        projections = sum(p.weight.numel() for p in self.matrices)
        per_pair = shapes["q"][0] * (shapes["q"][1] + shapes["v"][1])
        return 6.0 * (projections * sum(lengths) + per_pair * sum(map(self.visible_pairs, lengths)))

    def metrics(self) -> dict[str, float]:
        """Values to log during training, by name; the model adds the layer's index. ssmax_scale: the mean over heads."""
        return {} if self.ssmax_scale is None else {"ssmax_scale": self.ssmax_scale.mean().item()}
