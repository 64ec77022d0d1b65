"""The data module as a run uses it: every config, the record, bytes per token, errors in one line."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tokenizers import Tokenizer, models

from attnzoo import data
from attnzoo.data import tokenizers
from attnzoo.data.rows import RowsDataModule

CONFIGS = Path(__file__).parents[1] / "configs"
KINDS = {"imdb": "text_classification"}  # of sources that are another one's
NEEDED = {
    "text": ["data.paths=[{text}]"],
    "hf": ["data.name=json"],
    **dict.fromkeys(("listops", "pathfinder", "pathx", "images", "imdb", "movie_reviews"), ["task=classification"]),
    "retrieval": ["task=classification", f"data.path={Path(__file__).parent}/data/retrieval"],
    "same_package": ["task=classification", "data.packages=[lightning,pydantic]"],
    "text_classification": ["task=classification", "data.name=json"],
}


@pytest.fixture
def texts(tmp_path):
    """Twenty small files and a cache of their own."""
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"This is é text number {i}. " * (i + 1))
    return {"paths": str(tmp_path / "texts"), "val_fraction": 0.3, "cache_dir": str(tmp_path / "cache")}


def module(texts, **options):
    made = data.text(**{"seq_len": 32, "batch_size": 4, **texts, **options})
    made.prepare_data()
    made.setup()
    return made


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml")))
def test_every_config_makes_a_data_module(name, texts):
    overrides = [override.format(text=texts["paths"]) for override in NEEDED.get(name, [])]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [f"data={name}", "seed=7", *overrides])
    made = instantiate(cfg.data)
    assert isinstance(made, RowsDataModule)
    kind = "hf" if cfg.data._target_.endswith("hf") else KINDS.get(name, name)
    assert (made.objective, made.seed, made.kind) == (cfg.task.objective, 7, kind)


@pytest.mark.parametrize(("objective", "key", "value"), [("mlm", "batching", "balanced"), ("lm", "cross_documents", True)])
def test_a_position_in_other_rows_is_refused(texts, objective, key, value):
    """But for a state of an earlier version, which does not tell them."""
    before = module(texts, objective=objective)
    state = before.train_dataloader().state_dict()
    loader = module(texts, objective=objective, **{key: value}).train_dataloader()
    with pytest.raises(ValueError, match=f"{key} is {value!r}, it must be {getattr(before, key)!r} as in the checkpoint"):
        loader.load_state_dict(state)
    loader.load_state_dict({**state, "settings": {name: state["settings"][name] for name in state["settings"].keys() - loader.newer}})


@pytest.mark.parametrize(("key", "batching"), [("group_by_length", "by_length"), ("balance_lengths", "balanced")])
def test_configs_of_earlier_runs_say_how_batches_are_made_in_two_keys(texts, key, batching):
    made = data.text(**texts, seq_len=8, batch_size=1, objective="mlm", **{"group_by_length": False, "balance_lengths": False, key: True})
    assert made.batching == batching


def test_unknown_option_is_refused(texts):
    with pytest.raises(ValueError, match="data.seqlen: TextDataModule has no such option; like it: seq_len"):
        data.text(**texts, seq_len=8, batch_size=1, seqlen=8)


def test_record_is_plain_json(texts):
    record = module(texts).record()
    assert json.loads(json.dumps(record)) == record
    assert record["splits"]["train"]["documents"] + record["splits"]["validation"]["documents"] == 20
    assert record["tokenizer"]["name"] == "bytes" and len(record["sha256"]) == 64 and "python" in record["versions"]


@pytest.mark.parametrize("options", [{}, {"cross_documents": True}])
def test_bytes_per_token_counts_the_predicted_tokens(texts, options):
    made = module(texts, **options)
    n_targets = sum(batch["n_targets"] for batch in made.val_dataloader())
    assert made.bytes_per_token("validation") == made.record()["splits"]["validation"]["bytes"] / n_targets


def test_documents_are_whole(texts):
    made = module(texts)
    documents = made.documents("validation")
    decoded = {made.tokenizer.decode(ids) for ids in documents["input_ids"]}
    assert decoded == {d["text"] for d in made.source.documents() if d["split"] == "validation"}
    assert all(ids[-1] == made.tokenizer.eos_id for ids in documents["input_ids"])


def test_masked_batches_are_the_same_in_every_validation(texts):
    first, second = (list(module(texts, objective="mlm", seed=seed).val_dataloader()) for seed in (0, 1))
    assert len(first) > 1
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"]) and torch.equal(one["labels"], other["labels"])


def test_mask_rates_are_those_of_the_split(texts):
    made = module(texts, objective="mlm", mask_rate=0.5, eval_mask_rate=0.2)
    for loader, rate in ((made.train_dataloader(), 0.5), (made.val_dataloader(), 0.2)):
        n_targets, n_tokens = (sum(batch[key] for batch in loader) for key in ("n_targets", "n_tokens"))
        assert abs(n_targets - rate * n_tokens) < 5 * (n_tokens * rate * (1 - rate)) ** 0.5  # five standard deviations


def test_environment_names_the_cache(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNZOO_CACHE", str(tmp_path / "elsewhere"))
    module(texts, cache_dir=None)
    assert list((tmp_path / "elsewhere").glob("text-*/record.json"))


def test_any_tokenizer_can_be_used(texts, tmp_path):
    words = {"[MASK]": 0, "[SEP]": 1, "[CLS]": 2, "[PAD]": 3, "[UNK]": 4, "This": 5}
    Tokenizer(models.WordLevel(words, "[UNK]")).save(str(tmp_path / "words.json"))
    made = module(texts, tokenizer=str(tmp_path / "words.json"), objective="mlm", packed=False)
    batch = next(iter(made.train_dataloader()))
    assert batch["input_ids"].max() < made.tokenizer.vocab_size == 6
    assert tokenizers.from_record(made.tokenizer.record()).vocab_size == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 10**6}, "data.seq_len=1000000 must be below the [0-9]+ tokens of the train split: lower it"),
        ({"seq_len": 2500}, "data.seq_len=2500 must be below the [0-9]+ tokens of the validation split: lower it"),
        ({"seq_len": 0}, "data.seq_len=0 must be at least 3"),
        ({"batch_size": 0}, "data.batch_size=0 must be at least 1"),
        ({"objective": "translation"}, "data.objective='translation' must be one of lm, mlm"),
        ({"objective": "mlm", "mask_rate": 0}, "data.mask_rate=0 must be above 0 and at most 1"),
        ({"objective": "mlm", "cross_documents": True}, "data.cross_documents=true must go with objective"),
        ({"batching": "sorted"}, "data.batching='sorted' must be one of random, by_length, scheduled, balanced"),
        ({"batching": "by_length"}, "data.batching=by_length must go with objective"),
        ({"objective": "mlm", "batching": "balanced", "packed": False}, "data.batching=balanced must go with .*data.packed=true"),
        ({"objective": "mlm", "batching": "scheduled"}, "data.batching=scheduled must go with data.packed=false"),
        ({"objective": "mlm", "min_seq_len": 10**6}, "data.min_seq_len=1000000 must lie between 3 and data.seq_len"),
        ({"min_seq_len": 8}, "data.min_seq_len=8 must .*go with objective"),
    ],
)
def test_bad_options(texts, options, message):
    with pytest.raises(ValueError, match=message) as raised:
        module(texts, **options)
    assert "\n" not in str(raised.value)


def test_documents_are_there_where_a_split_is_shorter_than_a_row(texts):
    made = data.text(**{"seq_len": 2500, "batch_size": 4, **texts})
    made.setup("validate")
    assert len(made.documents("validation"))
    with pytest.raises(ValueError, match="data.seq_len=2500 must be below the [0-9]+ tokens of the validation split"):
        made.val_dataloader()


def test_passkeys_want_a_row_of_text_at_every_stage(texts):
    made = data.passkey(text=data.text(**{"seq_len": 32, "batch_size": 4, **texts}), seq_len=2500, batch_size=4, n_train=8, n_validation=8)
    made.prepare_data()
    with pytest.raises(ValueError, match="data.seq_len=2500 must be below the [0-9]+ tokens of the validation split"):
        made.setup("validate")




@pytest.mark.parametrize(("objective", "missing"), [("lm", "end of text"), ("mlm", "end of text"), ("mlm", "mask")])
def test_tokenizer_without_a_needed_token(texts, tmp_path, objective, missing):
    words = {"[UNK]": 0} | ({"</s>": 1} if missing == "mask" else {"[MASK]": 1})
    Tokenizer(models.WordLevel(words, "[UNK]")).save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match=f"data.tokenizer=.* must have a token for {missing}"):
        module(texts, tokenizer=str(tmp_path / "words.json"), objective=objective)
