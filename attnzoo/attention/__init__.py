"""Attention layers: one module per variant over the operator of the same name, found through configs/attention."""

from attnzoo.attention.base import Attention, AttentionSpec, KVCache, SequenceInfo, Supports

__all__ = ["Attention", "AttentionSpec", "KVCache", "SequenceInfo", "Supports"]
