"""Hugging Face: weights in and out, and attnzoo's attention in transformers' models, which importing it registers with transformers."""

from attnzoo.hub.dual_chunk import use_dual_chunk
from attnzoo.hub.interface import use_block_sparse
from attnzoo.hub.weights import config_from_huggingface, from_huggingface, save_huggingface
from attnzoo.registration import register

__all__ = ["config_from_huggingface", "from_huggingface", "save_huggingface", "use_block_sparse", "use_dual_chunk"]

register()  # where a folder named attnzoo hides attnzoo/__init__.py, nothing else has
del register
