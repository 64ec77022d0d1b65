"""Attention operators of attnzoo: one public function per operator, plain PyTorch tensors in and out.

It imports only torch, and triton when a kernel is first launched.
"""

from attnzoo_kernels import padding
from attnzoo_kernels.add_norm import add_norm
from attnzoo_kernels.block_sparse import BlockLayout, block_sparse_attention
from attnzoo_kernels.decode import decode_attention, latent_decode_attention
from attnzoo_kernels.differential import differential_attention
from attnzoo_kernels.distance_bias import distance_bias_attention
from attnzoo_kernels.dual_chunk import dual_chunk_attention
from attnzoo_kernels.flash import flash_attention
from attnzoo_kernels.flash_fp8 import flash_attention_fp8, quantize_fp8
from attnzoo_kernels.forgetting import forgetting_attention
from attnzoo_kernels.gelu import bias_gelu
from attnzoo_kernels.linear_cross_entropy import linear_cross_entropy
from attnzoo_kernels.moba import moba_attention, moba_blocks
from attnzoo_kernels.msa import msa_attention, msa_blocks
from attnzoo_kernels.nsa import nsa_attention
from attnzoo_kernels.ranges import KeyRanges
from attnzoo_kernels.routed import routed_attention
from attnzoo_kernels.sigmoid import sigmoid_attention
from attnzoo_kernels.tree import tree_attention
from attnzoo_kernels.two_frame import two_frame_attention

__all__ = [
    "BlockLayout", "KeyRanges", "add_norm", "bias_gelu", "block_sparse_attention", "decode_attention", "differential_attention",
    "distance_bias_attention", "dual_chunk_attention", "flash_attention", "flash_attention_fp8", "forgetting_attention",
    "latent_decode_attention", "linear_cross_entropy", "moba_attention", "moba_blocks", "msa_attention", "msa_blocks", "nsa_attention",
    "padding", "quantize_fp8", "routed_attention", "sigmoid_attention", "tree_attention", "two_frame_attention",
]
