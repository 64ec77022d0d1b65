"""Our tokenizers as transformers', so that AutoTokenizer and pipelines read what we export, with the same numbers for the same text."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attnzoo.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, NumberTokenizer

BYTE_SPECIALS = {"eos": "<|endoftext|>", "pad": "<|padding|>", "mask": "<|mask|>"}  # numbers 256 to 258


def to_transformers(tokenizer: Any, *, context: int) -> PreTrainedTokenizerFast:
    """One that encodes and decodes text as `tokenizer` does; context: its model_max_length, in tokens.

    As in training, a special token's name inside a text is ordinary text (`split_special_tokens`), and no token is added to a text. Bytes
    that are no UTF-8 cannot be put in: transformers' tokenizers take text. Words that are no numbers of a NumberTokenizer's are an error
    there. ValueError for other tokenizers.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        backend, special = Tokenizer.from_str(tokenizer.backend.to_str()), tokenizer.special_tokens
        backend.post_processor = None
    elif isinstance(tokenizer, ByteTokenizer):
        # byte-level BPE that merges nothing
        backend = Tokenizer(models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        special = BYTE_SPECIALS
    elif isinstance(tokenizer, NumberTokenizer):
        backend, special = Tokenizer(models.WordLevel({str(i): i for i in range(tokenizer.vocab_size)})), {}
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        raise ValueError(f"tokenizer: must be one of attnzoo.data.tokenizers, got {type(tokenizer).__name__}")
    names = {f"{role}_token": token for role, token in special.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=context, split_special_tokens=True, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"], **names)
