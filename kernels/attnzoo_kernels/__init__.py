"""Attention operators of attnzoo: one public function per operator, plain PyTorch tensors in and out.

Needs torch only. Triton is imported when a kernel is first launched.
"""

from attnzoo_kernels import padding
from attnzoo_kernels.flash import flash_attention

__all__ = ["flash_attention", "padding"]
