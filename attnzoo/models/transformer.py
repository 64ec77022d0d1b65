"""The base class of GPT and BERT: embeddings, blocks and output layer; dense, padded and packed input; parameter and FLOP counts."""

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo import fp8
from attnzoo import layers as by_layer
from attnzoo.attention.base import POSITIONS, Attention, AttentionSpec, KVCache, SequenceInfo, Supports
from attnzoo.attention.joint import lay_side_by_side
from attnzoo.batch import IGNORED
from attnzoo.models.blocks import Block, Sum, default_mlp_dim, in_compute_dtype, make_norm, normed
from attnzoo.signatures import check_options
from attnzoo_kernels import linear_cross_entropy, padding
from attnzoo_kernels.add_norm import Stream
from attnzoo_kernels.tree import tree_positions

if TYPE_CHECKING:
    from attnzoo_kernels.context_parallel import ContextParallel


class Transformer(nn.Module):
    """Token ids to logits over the vocabulary.

    vocab_size: the tokenizer's. pad_vocab_multiple: the number of rows of the embedding and output matrices is rounded up to a multiple of
        it, for faster matrix products; the returned logits are vocab_size wide.
    dim, n_layers, n_heads, n_kv_heads (default n_heads), head_dim (default dim / n_heads): the usual sizes.
    attention: called with an AttentionSpec for each layer, returns the layer; a class such as attnzoo.attention.flash.FlashAttention.
    train_context: the sequence length in training, in tokens (recorded, and passed to the attention layers).
    mlp: gelu | gelu_tanh | swiglu. mlp_dim: its width (default: as many parameters as an MLP without a gate of width 4 dim).
    norm: layernorm | rmsnorm, norm_eps, norm_position: pre | post.
    positions: learned (an embedding of max_positions rows, default train_context) | rotary (rope_base, rope_scaling, rope_factor,
        rope_options, partial_rotary_factor, rope_proportion: see `attnzoo.attention.base.AttentionSpec`) | alibi | none. original_context:
        the context length, in tokens, that the positions were trained on before it was extended (default train_context).
    qk_norm: normalise queries and keys per head. attention_temperature, attention_gate: `temperature` and `gate` of the AttentionSpec.
    layers: the options of the model and of the attention that differ by layer, see `attnzoo.layers`; None if all layers are alike.
    tie_embeddings: the output matrix is the token embedding. bias: in linear layers and LayerNorm.
    dropout: after the embedding, attention and MLP; attention_dropout: on attention weights.
    autocast_residual: under autocast the residual stream has autocast's dtype and not float32. Between post-norm blocks that is always
        so. torch.compile then keeps these sums for the backward, not the norms' float32 results, which halves the memory that norms
        take. Without autocast nothing changes.
    split_residual: in training under bfloat16 autocast the residual stream of pre-norm blocks is stored as two halves of 16 bits, which
        together are its exact float32 value (`attnzoo_kernels.add_norm`). The gradient between blocks, and what norms keep for the
        backward, have 16 bits.
    init_std: the standard deviation of the normal distribution that matrices and embeddings are drawn from. GPT-2 and BERT have 0.02. In a
        narrow model that makes attention nearly uniform: `torch.nn.Linear` begins with 1 / sqrt(3 dim), 0.07 at width 64.
    """

    causal: bool
    head_in_8_bits: bool | None = False  # whether the output layer multiplies in 8 bits in training; None: there is no such layer
    # (), differentiable: the sum of what layers added to `SequenceInfo.losses` in the last pass
    extra_loss: Tensor | None = None
    joins_norms = False  # whether sums and norms are one kernel in any pass under bfloat16 autocast, as with `split_residual` in training
    recompute_every: int | None = None  # in training every k-th block keeps only its input, and the backward recomputes the rest

    def __init__(
        self, *, vocab_size: int, dim: int, n_layers: int, n_heads: int, attention: Callable[[AttentionSpec], Attention],
        train_context: int, n_kv_heads: int | None = None, head_dim: int | None = None, mlp: str = "gelu", mlp_dim: int | None = None,
        norm: str = "layernorm", norm_eps: float = 1e-5, norm_position: str = "pre", positions: str = "rotary",
        max_positions: int | None = None, rope_base: float = 10000.0, rope_scaling: str = "none", rope_factor: float = 1.0,
        rope_options: Mapping[str, Any] | None = None, partial_rotary_factor: float = 1.0, rope_proportion: float = 1.0,
        original_context: int | None = None, qk_norm: bool = False, attention_temperature: str | Mapping[str, Any] = "none",
        attention_gate: str = "none", layers: Mapping[str, Any] | None = None,
        tie_embeddings: bool = True, dropout: float = 0.0, attention_dropout: float = 0.0, bias: bool = True, pad_vocab_multiple: int = 1,
        autocast_residual: bool = False, split_residual: bool = False, init_std: float = 0.02,
    ):
        super().__init__()
        _check_sizes(vocab_size=vocab_size, dim=dim, n_layers=n_layers, n_heads=n_heads, train_context=train_context,
                     pad_vocab_multiple=pad_vocab_multiple)
        if head_dim is None and dim % n_heads:
            raise ValueError(f"model.dim={dim} is not divisible by model.n_heads={n_heads}; change one of them or set model.head_dim")
        head_dim = dim // n_heads if head_dim is None else head_dim
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        mlp_dim = default_mlp_dim(mlp, dim) if mlp_dim is None else mlp_dim
        max_positions = train_context if max_positions is None else max_positions
        _check_sizes(head_dim=head_dim, n_kv_heads=n_kv_heads, mlp_dim=mlp_dim, max_positions=max_positions)
        if not callable(attention):
            raise TypeError(f"model.attention: must be called with an AttentionSpec, got {type(attention).__name__}")
        if positions not in POSITIONS:
            raise ValueError(f"model.positions={positions!r}: must be one of {', '.join(POSITIONS)}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"model.dropout={dropout}: must lie in [0, 1)")
        if not 0.0 < init_std < math.inf:
            raise ValueError(f"model.init_std={init_std}: must be a positive number")
        self.vocab_size, self.dim, self.train_context, self.init_std = vocab_size, dim, train_context, init_std
        self.autocast_residual = autocast_residual or norm_position == "post"
        if split_residual and self.autocast_residual:
            reason = "autocast_residual=true" if autocast_residual else f"norm_position={norm_position}"
            raise ValueError(f"model.split_residual=true: does not go with model.{reason}, with which there is no sum in float32; set "
                             "model.split_residual=false")
        self.split_residual = split_residual
        rows = -(-vocab_size // pad_vocab_multiple) * pad_vocab_multiple
        self.token_embedding = nn.Embedding(rows, dim)
        self.position_embedding = self._make_position_embedding(positions, max_positions)
        self.embedding_dropout = nn.Dropout(dropout)
        by_layer.check_positions(layers, positions)
        self.kinds = by_layer.kinds(layers, n_layers)
        mixable = {
            "positions": positions, "rope_base": rope_base, "rope_scaling": rope_scaling, "rope_factor": rope_factor,
            "rope_options": rope_options, "partial_rotary_factor": partial_rotary_factor, "rope_proportion": rope_proportion,
            "original_context": original_context, "qk_norm": qk_norm, "attention_temperature": attention_temperature,
            "attention_gate": attention_gate}
        shared = {
            "dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "n_layers": n_layers, "causal": self.causal,
            "train_context": train_context, "dropout": attention_dropout, "bias": bias, "norm_eps": norm_eps,
            "mlp_matrices": 3 if mlp == "swiglu" else 2}
        self.blocks = nn.ModuleList(
            Block(_attention(attention, layers, kind, mixable, layer=layer, **shared), dim=dim, mlp=mlp, mlp_dim=mlp_dim, norm=norm,
                  norm_eps=norm_eps, norm_position=norm_position, bias=bias, dropout=dropout)
            for layer, kind in enumerate(self.kinds))
        for block in self.blocks:
            lay_side_by_side(block.attention.projections)
        self.make_norm = partial(make_norm, norm, dim, norm_eps, bias)
        self.final_norm = self.make_norm() if norm_position == "pre" else nn.Identity()
        self.head = None if tie_embeddings else nn.Linear(dim, rows, bias=False)
        # set by subclasses that have them
        self.type_embedding, self.embedding_norm, self.head_bias = None, nn.Identity(), None

    def _make_position_embedding(self, positions: str, max_positions: int) -> nn.Embedding | None:
        if positions != "learned":
            return None
        if self.train_context > max_positions:
            raise ValueError(f"model.train_context={self.train_context} (data.seq_len) is longer than model.max_positions={max_positions}; "
                             f"set model.max_positions={self.train_context}, or model.positions=rotary")
        return nn.Embedding(max_positions, self.dim)

    def init_weights(self, residual_std: float | None = None) -> None:
        """Normal with `init_std`, zero biases; `residual_std` (default init_std): of the projections that write to the residual stream."""
        residual_std = self.init_std if residual_std is None else residual_std
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            nn.init.normal_(block.mlp.down_proj.weight, std=residual_std)
            block.attention.init_weights(self.init_std, residual_std)

    def forward(
        self, input_ids: Tensor, *, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
        attention_mask: Tensor | None = None, max_tokens: int | None = None, token_type_ids: Tensor | None = None,
        cache: list[KVCache] | None = None, parents: Tensor | None = None, logits_at: Tensor | None = None, targets: Tensor | None = None,
        target_weights: Tensor | None = None, reduction: str = "sum", context: "ContextParallel | None" = None,
        dropout_states: Tensor | None = None,
    ) -> Tensor:
        """Returns logits in the layout of input_ids, (..., vocab_size), or (n, vocab_size) with `logits_at`; with `targets` losses instead.

        input_ids: int64, (batch, seqlen), or packed (total,) with cu_seqlens (int32, sequences + 1) and max_seqlen (int).
        position_ids: like input_ids; by default each sequence counts from 0, after `cache`'s tokens.
        attention_mask: (batch, seqlen), nonzero where a token is real; padding is removed once here and its logits are zeros.
        max_tokens: the number of real tokens, or an upper bound; without it the host waits for the device to count them.
        token_type_ids: like input_ids, for models that have types. cache: from `new_cache`; input_ids are then the next tokens.
        parents: int32 (segments,), for packed trees, whose segments cu_seqlens delimits, see `attnzoo.batch.Inputs`; max_seqlen is then
            at least the length of the longest path.
        logits_at: int64 (n,), indices into input_ids.flatten() of the wanted logits; an index may occur more than once.
        targets: int64, flat, one per row of logits, -100 where there is no target. The result is then their cross-entropy, computed
            without all logits in memory (`attnzoo_kernels.linear_cross_entropy`): the sum, (), or with reduction="none" one loss per
            target. Padded input supports "none" only with `logits_at`.
        target_weights: float32, same shape as targets, factors of their losses; 1 by default.
        context: the plan by which several processes share these sequences. Per-token tensors, position_ids too, are then this process's
            part by `context.shard`; cu_seqlens and max_seqlen describe the whole sequences.
        dropout_states: int64 (layers, 2), seeds of attention dropout that all processes of `context` share, see `attnzoo.batch.Inputs`.
        """
        self._check_layout(input_ids, cu_seqlens, max_seqlen, attention_mask, cache, parents)
        if context is not None:
            self._check_context(input_ids, attention_mask, cache, parents, context)
        if attention_mask is not None:
            return self._forward_padded(input_ids, attention_mask, max_tokens, position_ids, token_type_ids, logits_at, targets, reduction,
                                        target_weights)
        newest = None if cache is None else cache[0].newest
        offset = 0 if cache is None or newest is not None else cache[0].length
        length = max_seqlen if input_ids.dim() == 1 else offset + input_ids.shape[1] if context is None else context.total
        self._check_length(length)
        if newest is not None:
            position_ids = newest.positions[:, None]
        if position_ids is None and parents is not None:
            position_ids = tree_positions(parents, cu_seqlens, input_ids.shape[0])
        elif position_ids is None and cu_seqlens is not None:
            position_ids = padding.position_ids(cu_seqlens, input_ids.shape[0] if context is None else context.total)
            position_ids = position_ids if context is None else context.shard(position_ids, -1)
        elif position_ids is None:
            position_ids = torch.arange(offset, length, device=input_ids.device)[None]
            position_ids = position_ids if context is None else context.shard(position_ids, -1)
        if cu_seqlens is not None and parents is None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            cu_seqlens = _without_repeated_end(cu_seqlens)
        seq = SequenceInfo(position_ids, cu_seqlens, max_seqlen, context=context, parents=parents, dropout_states=dropout_states)
        x = self.embed(input_ids, position_ids, token_type_ids)
        if self._splits(x):
            x = Sum(Stream(x))
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            # after the last attention, tokens no longer interact, so that only those in logits_at need the MLP
            rest = (seq, None if cache is None else cache[layer], logits_at if layer == last else None)
            again = self.recompute_every and self.training and torch.is_grad_enabled() and layer % self.recompute_every == 0
            x = checkpoint(block, x, *rest, use_reentrant=False) if again else block(x, *rest)
        self.extra_loss = seq.losses.total
        if isinstance(x, Sum):
            _, x = x.normed(self.final_norm, last=True)
        elif self.blocks[0].pre_norm:
            x = normed(self.final_norm, x)
        return self.logits(x) if targets is None else self.loss(x, targets, reduction, target_weights)

    def _splits(self, x: Tensor) -> bool:
        """Whether `split_residual`, or `joins_norms`, takes effect in a forward pass whose embeddings are x."""
        autocast = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
        return (self.split_residual and self.training or self.joins_norms) and autocast and x.dtype == torch.float32

    def take_extra_loss(self) -> Tensor | None:
        """Returns the last pass's `extra_loss` and resets it to None."""
        extra, self.extra_loss = self.extra_loss, None
        return extra

    def _forward_padded(self, input_ids, attention_mask, max_tokens, position_ids, token_type_ids, logits_at, targets, reduction,
                        weights) -> Tensor:
        """Remove the padding from the token ids, run packed, and put the logits back into rows, unless only their loss is wanted."""
        batch, seqlen = input_ids.shape
        tokens, indices, cu_seqlens, max_seqlen, _ = padding.unpad_input(input_ids, attention_mask, max_tokens=max_tokens)
        position_ids, token_type_ids = (
            None if ids is None else padding.remove_padding(ids.expand(batch, seqlen), indices) for ids in (position_ids, token_type_ids))
        if batch == 0:
            cu_seqlens = cu_seqlens.new_zeros(2)  # attention needs at least one sequence, even an empty one
        packed = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "token_type_ids": token_type_ids}
        if logits_at is None and targets is None:
            return padding.pad_input(self.forward(tokens, **packed), indices, batch, seqlen)
        if logits_at is None:
            if reduction != "sum":
                raise ValueError(f"reduction={reduction!r}: must be 'sum' for padded input without logits_at")
            # remove_padding fills unused rows with zeros; the shift by IGNORED turns these into IGNORED
            targets = padding.remove_padding(targets.view(batch, seqlen) - IGNORED, indices) + IGNORED
            weights = None if weights is None else padding.remove_padding(weights.view(batch, seqlen), indices)
            return self.forward(tokens, **packed, targets=targets, target_weights=weights)
        at = torch.searchsorted(indices, logits_at.contiguous()).clamp(max=indices.shape[0] - 1)
        there = indices[at] == logits_at
        if targets is not None:
            targets = torch.where(there, targets, IGNORED)
            return self.forward(tokens, **packed, logits_at=at, targets=targets, reduction=reduction, target_weights=weights)
        return torch.where(there[:, None], self.forward(tokens, **packed, logits_at=at), 0)

    def _check_layout(self, input_ids, cu_seqlens, max_seqlen, attention_mask, cache, parents=None) -> None:
        if input_ids.dim() not in (1, 2):
            raise ValueError(f"input_ids: must be (batch, seqlen) or packed (total,), got shape {tuple(input_ids.shape)}")
        if input_ids.dim() == 1:
            if cu_seqlens is None or not isinstance(max_seqlen, int):
                raise ValueError(f"cu_seqlens, max_seqlen: packed input_ids {tuple(input_ids.shape)} need both, max_seqlen as an int, "
                                 f"got {type(cu_seqlens).__name__} and {type(max_seqlen).__name__}")
            if attention_mask is not None or cache is not None:
                raise ValueError("attention_mask, cache: are for input_ids (batch, seqlen), got packed (total,); leave them out")
        elif cu_seqlens is not None or max_seqlen is not None or parents is not None:
            raise ValueError(f"cu_seqlens, max_seqlen, parents: are for packed input_ids (total,), got shape {tuple(input_ids.shape)}; "
                             "leave them out, or flatten input_ids")
        elif attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask: must have input_ids' shape {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}")
        if attention_mask is not None and cache is not None:
            raise ValueError("attention_mask: does not go with a cache; read rows of one length, or leave out the cache")

    @staticmethod
    def _check_context(input_ids: Tensor, attention_mask: Tensor | None, cache: list[KVCache] | None, parents: Tensor | None,
                       context: "ContextParallel") -> None:
        if attention_mask is not None or cache is not None or parents is not None:
            raise ValueError("attention_mask, cache, parents: do not go with context; give packed or dense rows of one length")
        if input_ids.shape[-1] != context.local:
            raise ValueError(f"input_ids: must be this process's {context.local} tokens, got shape {tuple(input_ids.shape)}; see "
                             "context.shard")

    def _check_length(self, length: int) -> None:
        if self.position_embedding is not None and length > self.position_embedding.num_embeddings:
            raise ValueError(f"a sequence of {length} tokens is longer than model.max_positions={self.position_embedding.num_embeddings} "
                             "learned positions; shorten it, or train with a larger model.max_positions or model.positions=rotary")

    def embed(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Token and position embeddings, (*input_ids.shape, dim)."""
        x = self.token_embedding(input_ids)
        if self.position_embedding is not None:
            x = x + self.position_embedding(position_ids)
        if self.type_embedding is not None:
            x = x + (self.type_embedding.weight[0] if token_type_ids is None else self.type_embedding(token_type_ids))
        elif token_type_ids is not None:
            raise ValueError("token_type_ids: this model has no token types; leave them out (a BERT has them with model.type_vocab_size)")
        x = self.embedding_dropout(self.embedding_norm(x))
        return in_compute_dtype(x) if self.autocast_residual else x

    def logits(self, x: Tensor) -> Tensor:
        """The logits (..., vocab_size), a view without the padded part of the vocabulary. x: the last block's output, (..., dim)."""
        product = fp8.linear if self.head_in_8_bits and self.training else F.linear
        return product(self.head_input(x), self.head_matrix, self.head_bias)[..., : self.vocab_size]

    def loss(self, x: Tensor, targets: Tensor, reduction: str = "sum", weights: Tensor | None = None) -> Tensor:
        """The cross-entropy of the output layer. Each target's loss is multiplied by its weight; for an ignored target it is zero."""
        x = in_compute_dtype(self.head_input(x)).flatten(0, -2)
        return linear_cross_entropy(x, self.head_matrix, targets, bias=self.head_bias, token_weights=weights, vocab_size=self.vocab_size,
                                    ignore_index=IGNORED, reduction=reduction, fp8=bool(self.head_in_8_bits and self.training))

    def head_input(self, x: Tensor) -> Tensor:
        """The input of the output layer's matrix product."""
        return x

    @property
    def head_matrix(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight

    def new_cache(self, batch: int, max_len: int) -> list[KVCache]:
        """One empty cache per layer for `batch` sequences of up to `max_len` tokens."""
        return [block.attention.new_cache(batch, max_len) for block in self.blocks]

    @property
    def supports(self) -> Supports:
        """What the attention of all layers can do."""
        return reduce(Supports.common, (block.attention.supports for block in self.blocks))

    @property
    def reads_in_parts(self) -> bool:
        """Whether reading a text in parts, with a cache, gives the same result as reading it at once."""
        by_length = any(block.attention.spec.rope_scaling in ("dynamic", "longrope") for block in self.blocks)
        return self.causal and self.supports.cache and not by_length

    @property
    def n_parameters(self) -> int:
        """The number of trainable and frozen parameters. Tied ones count once; the padded part of the vocabulary does not count."""
        rows = self.token_embedding.num_embeddings
        by_token = (self.token_embedding.weight, self.head_bias, None if self.head is None else self.head.weight)
        unused = sum(p.numel() // rows * (rows - self.vocab_size) for p in by_token if p is not None)
        return sum(p.numel() for p in self.parameters()) - unused

    def flops(self, lengths: list[int], *, n_logits: int | None = None) -> float:
        """Floating point operations of forward and backward over sequences of these lengths, matrix products only.

        n_logits: the number of positions that the last MLP and the output layer are applied to, by default all.
        """
        tokens = sum(lengths)
        n_logits = tokens if n_logits is None else n_logits
        *mlps, last_mlp = (sum(p.numel() for p in block.mlp.parameters() if p.dim() == 2) for block in self.blocks)
        attention = sum(block.attention.flops(lengths) for block in self.blocks)
        return attention + 6.0 * (sum(mlps) * tokens + (last_mlp + self.head_products()) * n_logits)

    def head_products(self) -> int:
        """Multiplications of the output layer for one token."""
        return self.dim * self.vocab_size

    def metrics(self) -> dict[str, float]:
        """The layers' own metrics as attention/<metric>/<layer>."""
        return {
            f"attention/{name}/{layer}": value
            for layer, block in enumerate(self.blocks)
            for name, value in block.attention.metrics().items()
        }


def _attention(make: Callable[[AttentionSpec], Attention], layers: Mapping[str, Any] | None, kind: str | None, mixable: Mapping[str, Any],
               **shared: Any) -> Attention:
    """Builds the attention of a layer of this kind. ValueErrors are raised with the kind's name."""
    try:
        own = ((layers or {}).get(kind) or {}).get("attention") or {}
        if callable(own):
            make = own
        elif own:
            check_options("attention", make.func if isinstance(make, partial) else make, own)
            make = partial(make, **own)
        described = {**mixable, **by_layer.overrides(layers, kind)}
        named = {name.removeprefix("attention_"): value for name, value in described.items()}
        return make(AttentionSpec(**named, **shared))
    except ValueError as error:
        if kind is None:
            raise
        raise ValueError(f"layers.{kind}: {error}") from error


def _check_sizes(**sizes) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"model.{name}: must be a positive integer, got {value!r}")


def _without_repeated_end(cu_seqlens: Tensor) -> Tensor:
    """cu_seqlens without its repeated last values. On a GPU they keep shapes static; on a CPU each of them would cost a row of max_seqlen
    tokens."""
    return cu_seqlens[: max(2, int((cu_seqlens < cu_seqlens[-1]).sum()) + 1)]
