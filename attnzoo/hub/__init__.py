"""Hugging Face: import and export of weights, our attention in transformers' models, our models in its Auto classes.

Importing this package imports transformers and registers `attnzoo_flash`, `attnzoo_block_sparse`, `attnzoo_gpt`, `attnzoo_bert` and the
config of the Forgetting Transformer there.
"""

from attnzoo.hub import auto, fox, interface
from attnzoo.hub.auto import from_checkpoint
from attnzoo.hub.dual_chunk import use_dual_chunk
from attnzoo.hub.engine import use_pages
from attnzoo.hub.interface import use_block_sparse
from attnzoo.hub.two_frame import use_two_frame
from attnzoo.hub.weights import attention_from_huggingface, config_from_huggingface, from_huggingface, save_huggingface

__all__ = ["attention_from_huggingface", "config_from_huggingface", "from_checkpoint", "from_huggingface", "save_huggingface",
           "use_block_sparse", "use_dual_chunk", "use_pages", "use_two_frame"]

interface.register()
auto.register()
fox.register()
