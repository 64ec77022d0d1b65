"""The attention layer's contract: one description to build a layer from, one base that a variant extends by `attend`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.attention import joint
from attnzoo.attention.cache import DECODED_TOKENS, KVCache
from attnzoo.attention.context import attend_in_context
from attnzoo.attention.norm import RMSNorm
from attnzoo.attention.positions import ROPE_OPTIONS, ROPE_SCALINGS, Rope, alibi_slopes, make_rope, rotate
from attnzoo.attention.sequence import SequenceInfo
from attnzoo.attention.supports import POSITIONS, Supports, check_context_parallel
from attnzoo.attention.temperature import make_temperature

GATES = ("none", "elementwise", "head")
Impl = Literal["gluon", "triton", "cpu", "reference"]  # a path of the operators; None takes the fastest that runs


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer is built from. `n_heads` is the baseline's: a variant that pairs or doubles heads does so itself.

    layer: this layer's index, from 0 to n_layers - 1. train_context: tokens a model reads at once in training.
    positions: "learned" leaves positions to the model, "rotary" and "alibi" are applied here, "none" are in the causal mask alone
        (Kazemnejad et al. 2023, arXiv:2305.19466).
    rope_base, rope_scaling, rope_factor, rope_options: see `attnzoo.attention.positions`. partial_rotary_factor: the share of a head's
        channels that is rotated, from the first on. rope_proportion: the share of its pairs that turn, the fastest.
    qk_norm: queries and keys are normalised by head (RMSNorm with norm_eps, Henry et al. 2020, arXiv:2010.04245) before they are rotated.
    temperature: what queries are multiplied by, see `attnzoo.attention.temperature.make_temperature`.
    gate: the output is multiplied by sigmoid(x W), a number for each channel ("elementwise") or each head ("head") of it (Qiu et al. 2025,
        arXiv:2505.06708).
    original_context: tokens that the positions were trained on before the context was extended, None for train_context.
    mlp_matrices: dim x mlp_dim matrices of the MLP behind the layer, three with a gate.
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
        """Tokens that the positions were trained on."""
        return self.original_context or self.train_context

    def rope(self, head_dim: int) -> Rope:
        """The rotation of heads of this width."""
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
    """Base of all variants: projections, rotary positions and cache. A variant overrides `attend`, and if it must

    - `head_shapes`: other numbers or widths of heads;
    - `project`, `projections`: more inputs to `attend` than q, k and v, made from x, or other matrices to make them;
    - `inputs`: what depends on the tokens before, too;
    - `apply_positions`: un-rotated or otherwise rotated queries and keys;
    - `kept`, `attend_over`, `attend_cached`, `attend_newest`: more in the cache than keys and values, a kernel of its own for the newest
      tokens over it;
    - `finish`: a norm or a factor on attend's output, which is itself weights times values;
    - `init_weights`, `mlp_dim`, `visible_pairs`, `metrics`, `plain`, `check_context_parallel`, `check_trees`.

    The parameters are `q_proj`, `k_proj`, `v_proj`, `o_proj` (and, as the spec asks for them, `q_norm`, `k_norm`, `g_proj`, `ssmax_scale`)
    in all variants, so that a checkpoint of one loads into another.
    """

    supports = Supports()
    extends_context = False  # whether it reads beyond spec.known_context by design, so that a longer training must keep that
    drawn_with = ""  # the options with which alone `attend` gives weights times values, which a picture needs
    decodes_on_device = False  # whether `attend_newest` holds, so that decoding can be a CUDA graph; `attend` must look at seq.cu_seqlens_k
    reads_pages = False  # whether `attend_newest` looks at the cache's block_table
    page = 1  # tokens of a page in which `attend_newest` reads a cache, of whose rows' room a page is then a divisor
    divides_heads = False  # whether `attend` of some heads needs nothing by head but its tensors, so that groups of heads can take turns
    joined: tuple[Tensor, Tensor | None] | None = None  # weight and bias of `project`'s product; decoding joins them once

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
            # so that the mean factor over the trained context is one at first
            self.ssmax_scale = nn.Parameter(torch.full((self.head_shapes()["q"][0],), 1 / self.temperature.mean_log))

    @property
    def name(self) -> str:
        """The variant's name on the command line: its module's."""
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    def check_supported(cls, causal: bool, positions: str, dropout: float) -> None:
        """Raises ValueError for a model that `supports` leaves out."""
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
        """Raises ValueError where the variant takes no packed sequences, which a model makes of padded ones too, or no trees of them."""
        name = cls.__module__.rpartition(".")[2]
        if not cls.supports.packed:
            way_out = "set data.cross_documents=true" if causal else "a bidirectional model packs what is padded; use a gpt model"
            raise ValueError(f"attention={name} takes no packed sequences; {way_out}, or attention=flash")
        if trees and not causal:
            raise ValueError("parents: trees of shared prefixes are for causal models; use a gpt model, or packed sequences")
        if trees and not cls.supports.trees:
            raise ValueError(f"attention={name} takes no trees of shared prefixes; set data.trees=false, or attention=flash")

    def check_trees(self) -> None:
        """Raises ValueError where the layer, as it is configured, takes no trees."""
        self.check_packed(self.spec.causal, trees=True)

    def check_context_parallel(self, packed: bool) -> None:
        """Raises ValueError where several devices cannot read one sequence by this layer."""
        check_context_parallel(self, packed)

    def head_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, width) of the projected "q", "k", "v" and of `attend`'s output "out"."""
        spec = self.spec
        queries, keys = (spec.n_heads, spec.head_dim), (spec.n_kv_heads, spec.head_dim)
        return {"q": queries, "k": keys, "v": keys, "out": queries}

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """What `project` multiplies x by, in one product."""
        return self.q_proj, self.k_proj, self.v_proj

    @property
    def matrices(self) -> list[nn.Linear]:
        """All projections, each once."""
        found = (*self.projections, self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.g_proj)
        return [*dict.fromkeys(filter(None, found))]

    @property
    def in_float32(self) -> tuple[nn.Module, ...]:
        """What computes in float32 under autocast, too, so that decoding leaves its weights as they are."""
        return ()

    def init_weights(self, std: float, residual_std: float) -> None:
        """Normal weights, zero biases; `residual_std` is for the projection that writes to the residual stream."""
        for projection in self.matrices:
            nn.init.normal_(projection.weight, std=residual_std if projection is self.o_proj else std)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def mlp_dim(self, baseline: int) -> int:
        """Width of the MLP behind this layer; a variant with more parameters than the baseline may narrow it."""
        return baseline

    def forward(self, x: Tensor, seq: SequenceInfo, cache: KVCache | None = None) -> Tensor:
        """x (batch, seqlen, dim) or packed (total, dim), with `cache` the new tokens only; returns x's shape."""
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
        return self.o_proj(out.flatten(-2))

    def _append_newest(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """The queries with their positions; what is kept goes to the cache. In one launch where no variant has its own way."""
        usual = type(self).apply_positions is Attention.apply_positions and type(self).kept is Attention.kept
        if usual and q.is_cuda and q.dtype == cache.keys.dtype != torch.float64:
            from attnzoo_kernels.decode.append import append_rotated

            cos, sin = (None, None) if self.rope is None else self.rotary(seq)
            return append_rotated(q, k, v, cos, sin, cache.keys, cache.values, cache.newest.places)
        q, k = self.apply_positions(q, k, seq)
        cache.append(*self.kept(k, v, *rest))
        return q

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v as (..., heads, width), and whatever else `attend` takes after `seq`."""
        shapes = self.head_shapes()
        parts = self.product(x).split([p.out_features for p in self.projections], dim=-1)
        return tuple(part.unflatten(-1, shapes[name]) for name, part in zip("qkv", parts, strict=True))

    def product(self, x: Tensor) -> Tensor:
        """x times all `projections`, one behind the other."""
        return joint.product(x, self.projections) if self.joined is None else F.linear(x, *self.joined)

    def _apply(self, fn: Callable, recurse: bool = True) -> "Attention":
        """As `to`, `cuda` and `float` move parameters: each to a memory of its own."""
        super()._apply(fn, recurse)
        joint.lay_side_by_side(self.projections)
        return self

    def inputs(self, x: Tensor, seq: SequenceInfo, cache: KVCache | None) -> tuple[Tensor, ...]:
        """What `project` gives of the new tokens, changed by what comes from the tokens before them."""
        return self.project(x)

    def apply_positions(self, q: Tensor, k: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """Queries and keys of the new tokens as `attend` and the cache see them."""
        if self.spec.positions != "rotary":
            return q, k
        cos, sin = self.rotary(seq)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def temper(self, q: Tensor, seq: SequenceInfo) -> Tensor:
        """Queries (..., heads, width) times the factors of their positions, which is what the logits are multiplied by."""
        if self.temperature is None:
            return q
        factor = seq.once(self.temperature.key, lambda: self.temperature.factor(seq.context_lengths(self.spec.causal)))[..., None]
        if self.ssmax_scale is not None:
            factor = factor * self.ssmax_scale
        return (q * factor[..., None].to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)

    def rotary(self, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """cos and sin of the pass's tokens, float32 (*position_ids.shape, rotated channels / 2)."""
        return seq.once(self.rope.key, lambda: self.rope.tables(seq.position_ids))

    def alibi_slopes(self, seq: SequenceInfo, n_heads: int, device: torch.device) -> Tensor | None:
        """ALiBi's slopes, float32 (n_heads,), or None with other positions."""
        if self.spec.positions != "alibi":
            return None
        return seq.once(("alibi", n_heads), lambda: alibi_slopes(n_heads, device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """Attention itself: q (..., heads, width) of the new tokens, k and v of all tokens; returns (..., heads, width) as "out".

        With a cache k and v are longer than q, whose tokens are then the last ones.
        """
        raise NotImplementedError

    def kept(self, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """What a cache holds of new tokens: keys, values, and what a variant needs of earlier tokens besides, (batch, new tokens, ...)."""
        return k, v

    def attend_over(self, q: Tensor, kept: Sequence[Tensor], seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """`attend` of the last tokens over what is `kept` of all tokens; rest: of the last tokens."""
        return self.attend(q, *kept, seq, *rest)

    def attend_cached(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """`attend_over` of the newest tokens and the cache, which holds them already."""
        return self.attend_over(q, cache.read(), seq, *rest)

    def attend_newest(self, q: Tensor, cache: KVCache, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        """The same of one token of each row, (batch, 1, ...), whose place only the device knows (`cache.newest`): by packed sequences."""
        queries, keys = seq.once("newest", cache.newest.packed)
        rows = seq.once("newest rows", lambda: SequenceInfo(cache.newest.positions, queries, 1, keys=(keys, cache.max_len)))
        q, k, v, *rest = (x.flatten(0, 1) for x in (q, *cache.buffers, *rest))
        return self.attend(q, k, v, rows, *rest)[:, None]

    def decodes_by_kernel(self, q: Tensor) -> bool:
        """Whether a variant with an `impl` reads a cache, whose length the host knows, by `decode_attention`."""
        differentiable = torch.is_grad_enabled() and q.requires_grad
        return q.is_cuda and self.impl != "reference" and not differentiable and self.dropout_p == 0 and q.shape[1] <= DECODED_TOKENS

    @staticmethod
    def cache_lengths(cache: KVCache, seq: SequenceInfo) -> Tensor:
        """Tokens of each row that the cache holds, int32 (batch,), where the shapes of the buffers do not tell."""
        return seq.once("cache lengths", lambda: torch.full((cache.batch,), cache.length, dtype=torch.int32, device=cache.keys.device))

    def finish(self, out: Tensor) -> Tensor:
        """What is done to attend's output (..., heads, width) of each token, such as a norm."""
        return out

    @property
    def keys_before(self) -> int:
        """How many keys before its own a query sees at most; -1 is unlimited."""
        return -1

    @property
    def dropout_p(self) -> float:
        return self.spec.dropout if self.training else 0.0

    @property
    def plain(self) -> bool:
        """Whether the output is that of ordinary softmax attention over all (earlier) tokens, as configured."""
        return False

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_len` tokens."""
        if not (self.supports.cache and self.spec.causal):
            reason = "has no KV cache" if self.spec.causal else "is bidirectional here, which allows no KV cache"
            raise ValueError(f"attention={self.name} {reason}; read the whole sequence at once instead")
        return KVCache(batch, max_len)

    def visible_pairs(self, length: int) -> int:
        """Pairs of a query and a key that it sees, in one sequence of this length."""
        return length * (length + 1) // 2 if self.spec.causal else length * length

    def flops(self, lengths: list[int]) -> float:
        """Floating point operations of forward and backward (twice the forward) over sequences of these lengths."""
        shapes = self.head_shapes()
        projections = sum(p.weight.numel() for p in self.matrices)
        per_pair = shapes["q"][0] * (shapes["q"][1] + shapes["v"][1])
        return 6.0 * (projections * sum(lengths) + per_pair * sum(map(self.visible_pairs, lengths)))

    def metrics(self) -> dict[str, float]:
        """What is worth logging during training, by name; the model adds the layer. ssmax_scale: the heads' mean."""
        return {} if self.ssmax_scale is None else {"ssmax_scale": self.ssmax_scale.mean().item()}
