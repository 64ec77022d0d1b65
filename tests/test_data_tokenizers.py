"""Tokenizers: text survives the round trip, a record rebuilds them, wrong names are explained."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from attnzoo.data import tokenizers
from attnzoo.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer

TEXT = "def naïve(x):\n\treturn '日本' + x  # 🎉\r\n"


def bpe(special_tokens):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["return return def def x x"], trainer)
    return backend


@pytest.fixture
def gpt(tmp_path):
    path = tmp_path / "tokenizer.json"
    bpe(["<|endoftext|>"]).save(str(path))
    return tokenizers.load(str(path))


def test_bytes_are_utf8():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([97, tokenizer.eos_id, tokenizer.mask_id, 98]) == "ab"
    assert {tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id} == set(range(256, tokenizer.vocab_size))


@pytest.mark.parametrize("make", [ByteTokenizer, lambda: HuggingFaceTokenizer(bpe(["[MASK]"]), "mine", {"mask": "[MASK]"})])
def test_record_is_plain_json_and_rebuilds(make):
    tokenizer = make()
    again = tokenizers.from_record(json.loads(json.dumps(tokenizer.record())))
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    for attribute in ("name", "vocab_size", "eos_id", "pad_id", "mask_id", "cls_id", "sep_id"):
        assert getattr(again, attribute) == getattr(tokenizer, attribute)
    assert tokenizers.fingerprint(again) == tokenizers.fingerprint(tokenizer)


def test_tokenizer_json_by_path(gpt):
    assert gpt.decode(gpt.encode(TEXT)) == TEXT
    assert gpt.eos_id == gpt.pad_id == gpt.backend.token_to_id("<|endoftext|>")
    assert gpt.mask_id is None
    assert [ids.tolist() for ids in gpt.encode_batch([TEXT, ""])] == [gpt.encode(TEXT), []]
    assert max(gpt.backend.get_vocab().values()) < gpt.vocab_size


def test_special_tokens_in_a_document_are_text(gpt):
    ids = gpt.encode("a<|endoftext|>b")
    assert gpt.eos_id not in ids
    assert gpt.decode(ids) == "a<|endoftext|>b"
    assert gpt.eos_id not in tokenizers.from_record(gpt.record()).encode("<|endoftext|>")


def test_folder_of_a_transformers_tokenizer(tmp_path):
    from transformers import PreTrainedTokenizerFast

    backend = bpe(["[CLS]", "[SEP]", "[MASK]", "[PAD]"])
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path)
    tokenizer = tokenizers.load(str(tmp_path))
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id, tokenizer.pad_id) == (0, 1, 2, 3)
    assert tokenizer.eos_id == tokenizer.sep_id
    assert not {0, 1} & set(tokenizer.encode("x"))


def test_fingerprint_depends_on_the_vocabulary_not_on_the_path(gpt):
    same = HuggingFaceTokenizer(bpe(["<|endoftext|>"]), "elsewhere", {"eos": "<|endoftext|>"})
    other = HuggingFaceTokenizer(bpe(["<s>"]), gpt.name, {"eos": "<s>"})
    assert tokenizers.fingerprint(gpt) == tokenizers.fingerprint(same) != tokenizers.fingerprint(other)


def test_unknown_name_is_explained(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="data.tokenizer='no/such-tokenizer' must be") as raised:
        tokenizers.load("no/such-tokenizer")
    assert "\n" not in str(raised.value)


def test_a_name_that_the_hub_does_not_answer_for_is_asked_once(monkeypatch):
    asked = []

    def model_info(self, name, *, timeout):
        asked.append((name, timeout))
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ValueError, match="data.tokenizer='no/such-tokenizer' must be .*: no network$"):
        tokenizers.load("no/such-tokenizer")
    assert asked == [("no/such-tokenizer", 5)]


def test_broken_file_is_explained(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="data.tokenizer=.*tokenizer.json"):
        tokenizers.load(str(tmp_path / "tokenizer.json"))


def test_foreign_record_is_refused():
    with pytest.raises(ValueError, match="tokenizer record: kind is 'words'"):
        tokenizers.from_record({"kind": "words"})
