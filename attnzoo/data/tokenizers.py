"""Tokenizers: raw bytes, plain numbers, or any Hugging Face tokenizer, with one small interface and a record that rebuilds them.

Every tokenizer has `name`, `vocab_size`, the ids `eos_id`, `pad_id`, `mask_id`, `cls_id`, `sep_id` (None if there is no such token), and
`encode`, `encode_batch`, `decode`, `decode_stream` and `record`. `decode_stream` yields text token by token and holds back characters that
are not complete yet; `after` are the tokens before the first one, which may decide whether a space stands between. The name of a special
token inside a document is encoded as ordinary text.
"""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np


class ByteTokenizer:
    """UTF-8 bytes: ids 0 to 255 are the bytes, 256 is the end of text, 257 padding and 258 the mask."""

    name = "bytes"
    eos_id, pad_id, mask_id = 256, 257, 258
    cls_id = sep_id = None
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

    def decode_stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        yield from (decoder.decode(bytes([i])) for i in ids if i < 256)
        yield decoder.decode(b"", final=True)

    def record(self) -> dict:
        return {"kind": "bytes"}


class NumberTokenizer:
    """Tokens that are numbers, for tasks without text. As text they are decimal numbers, separated by spaces."""

    name = "numbers"
    pad_id = 0
    eos_id = mask_id = cls_id = sep_id = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a word that is not a number of this vocabulary."""
        words = text.split()
        if other := next((word for word in words if not word.isdecimal() or int(word) >= self.vocab_size), None):
            raise ValueError(f"{other!r} must be a number from 0 to {self.vocab_size - 1}: this model's tokens are numbers")
        return [int(word) for word in words]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), np.uint32) for text in texts]

    def decode(self, ids) -> str:
        return " ".join(str(int(i)) for i in ids)

    def decode_stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        yield from (f" {i}" for i in ids)

    def record(self) -> dict:
        return {"kind": "numbers", "vocab_size": self.vocab_size}


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer` with the ids of its special tokens.

    Args:
        backend: the fast tokenizer; padding and truncation are switched off.
        name: the file, folder or name on the hub that it was loaded from.
        special_tokens: the token's text for each role: "eos", "pad", "mask", "cls", "sep". Without "eos" the token of "sep" ends a text,
            and without "pad" the end of text pads.
    """

    roles = ("eos", "pad", "mask", "cls", "sep")

    def __init__(self, backend, name: str, special_tokens: dict[str, str]):
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        self.backend, self.name = backend, name
        self.special_tokens = {role: token for role in self.roles if (token := special_tokens.get(role)) is not None}
        ids = {role: backend.token_to_id(token) for role, token in self.special_tokens.items()}
        self.eos_id = ids.get("eos", ids.get("sep"))
        self.pad_id = ids.get("pad", self.eos_id)
        self.mask_id, self.cls_id, self.sep_id = ids.get("mask"), ids.get("cls"), ids.get("sep")
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(e.ids, np.uint32) for e in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_stream(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        for i in after:  # not DecodeStream(ids=after), which gives their text again if they end in the middle of a character
            stream.step(self.backend, i)
        yield from (piece for i in ids if (piece := stream.step(self.backend, i)) is not None)

    def record(self) -> dict:
        """Plain JSON that holds the whole tokenizer, so that a checkpoint needs neither the hub nor the original files."""
        return {"kind": "huggingface", "name": self.name, "special_tokens": self.special_tokens, "tokenizer_json": self.backend.to_str()}


def check_name(name: str) -> None:
    """Raises ValueError if `name` is not "bytes", not a path that exists, and neither in the Hugging Face cache nor on the hub.

    It also raises if the hub cannot be reached. The hub is asked once, with a timeout of five seconds; transformers would retry for more
    than a minute.
    """
    if name == "bytes" or Path(name).expanduser().exists():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("tokenizer.json", "tokenizer_config.json", "config.json")):
            return
        HfApi().model_info(name, timeout=5)
    except RepositoryNotFoundError as error:
        raise ValueError(f"{_must_be(name)}: the hub has none of that name, or it is private") from error
    except HfHubHTTPError:  # a mirror may answer differently; an error will then come up when the files are read
        return
    except Exception as error:  # for instance an invalid name, no network, or offline mode set in the environment
        raise ValueError(f"{_must_be(name)}: {_reason(error)}") from error


def _must_be(name: str) -> str:
    return f'data.tokenizer={name!r} must be "bytes", a tokenizer.json, a folder with one, or a name on the Hugging Face hub'


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def load(name: str):
    """The tokenizer called `name`: "bytes", a tokenizer.json, a folder that `AutoTokenizer` can read, or a name on the Hugging Face hub.

    Raises:
        ValueError: nothing of that name can be loaded, or it has no fast (`tokenizers`) form.
    """
    if name == "bytes":
        return ByteTokenizer()
    check_name(name)
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    try:
        if path.is_file():
            return _from_file(path)
        loaded = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as error:  # the hub, the parser and the file system each raise exceptions of their own
        raise ValueError(f"{_must_be(name)}: {_reason(error)}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"data.tokenizer={name!r} must have a fast form (a tokenizer.json), {type(loaded).__name__} has none")
    return HuggingFaceTokenizer(backend, name, {role: getattr(loaded, f"{role}_token", None) for role in HuggingFaceTokenizer.roles})


def _from_file(path: Path) -> HuggingFaceTokenizer:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(path))
    # a tokenizer.json alone does not say which role each of its special tokens has, so the usual names are looked up
    usual = {
        "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
        "pad": ("<pad>", "[PAD]", "<|padding|>"),
        "mask": ("[MASK]", "<mask>"),
        "cls": ("[CLS]",),
        "sep": ("[SEP]",),
    }
    return HuggingFaceTokenizer(
        backend, str(path), {role: next((n for n in names if backend.token_to_id(n) is not None), None) for role, names in usual.items()}
    )


def from_record(record: dict):
    """The tokenizer that wrote `record`; no file is read.

    Raises:
        ValueError: `record` was not written by a tokenizer of this module.
    """
    if record.get("kind") == "bytes":
        return ByteTokenizer()
    if record.get("kind") == "numbers":
        return NumberTokenizer(record["vocab_size"])
    if record.get("kind") == "huggingface":
        from tokenizers import Tokenizer

        return HuggingFaceTokenizer(Tokenizer.from_str(record["tokenizer_json"]), record["name"], record["special_tokens"])
    raise ValueError(f'tokenizer record: kind is {record.get("kind")!r}, it must be "bytes", "numbers" or "huggingface"')


def fingerprint(tokenizer) -> str:
    """sha256 of everything that decides how `tokenizer` encodes; it does not depend on the path that it was loaded from."""
    record = {key: value for key, value in tokenizer.record().items() if key != "name"}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
