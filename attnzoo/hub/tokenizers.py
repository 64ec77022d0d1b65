"""Our tokenizers as transformers' tokenizers, so that AutoTokenizer and pipelines read what we export, with the same ids for a text."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attnzoo.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, NumberTokenizer

BYTE_SPECIALS = {"eos": "<|endoftext|>", "pad": "<|padding|>", "mask": "<|mask|>"}  # ids 256 to 258


def to_transformers(tokenizer: Any, *, context: int) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that encodes and decodes text as `tokenizer` does. context: its model_max_length, in tokens.

    As in training, the name of a special token inside a text is ordinary text (`split_special_tokens`), and no token is added to a text.
    Bytes that are not UTF-8 cannot be encoded, because transformers' tokenizers take text. If `tokenizer` is a NumberTokenizer, words that
    are not numbers of its vocabulary are an error there. Raises ValueError for tokenizers of other classes.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        backend, special = Tokenizer.from_str(tokenizer.backend.to_str()), tokenizer.special_tokens
        backend.post_processor = None
    elif isinstance(tokenizer, ByteTokenizer):
        # byte-level BPE without merges
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
