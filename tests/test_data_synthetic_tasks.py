"""Data modules of tasks made by rule: same rows whatever the batches, devices and seed promise; accuracy; errors in one line."""

import json

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from tiny_run import ROOT, column

from attnzoo import checkpoint, runner
from attnzoo.data import tokenizers
from attnzoo.data.loader import BatchLoader
from attnzoo.data.synthetic import tasks
from attnzoo.run.command_line import one_line_errors

TOKEN_TASKS = ["recall", "copying", "induction"]
SMALL = ["data.seq_len=32", "data.vocab_size=24", "data.batch_size=8", "data.n_train=50", "data.n_validation=21"]
TRAINING = [
    "model.dim=32", "model.n_layers=1", "model.n_heads=2", "trainer=cpu", "trainer.precision=32", "trainer.max_steps=6",
    "trainer.val_check_interval=3", "trainer.log_every_n_steps=1", "optimizer.warmup_steps=2", "callbacks.progress=null",
]  # fmt: skip


def config(folder, *overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", overrides=[*TRAINING, f"run_dir={folder / 'run'}", *overrides])


def passkeys(folder, *overrides):
    """The overrides for passkeys in a text of random words."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(" ".join(map(str, np.random.default_rng(0).integers(10**6, 10**7, 2000))))
    where = [f"data.text.paths=[{text}]", f"data.text.cache_dir={folder / 'cache'}"]
    sizes = ["data.seq_len=320", "data.batch_size=4", "data.n_train=9", "data.n_validation=6"]
    return ["data=passkey", "data@data.text=text", *where, *sizes, *overrides]


def build(folder, *overrides):
    data = instantiate(config(folder, *overrides).data, _convert_="all")
    data.prepare_data()
    data.setup()
    return data


def rows_of(loader):
    batches = list(loader)
    return torch.cat([torch.stack([b["input_ids"], b["labels"]], dim=1) for b in batches])


@pytest.fixture(params=[*TOKEN_TASKS, "passkey"])
def overrides(request, tmp_path):
    return passkeys(tmp_path) if request.param == "passkey" else [f"data={request.param}", *SMALL]


def test_batches_say_where_their_answers_are(tmp_path, overrides):
    data = build(tmp_path, *overrides)
    for batch in [*data.train_dataloader(), *data.val_dataloader()]:
        asked = (batch["labels"].flatten() != -100).nonzero()[:, 0]
        assert torch.equal(asked, batch["logits_at"]) and len(asked) == batch["n_targets"] > 0
        assert batch["input_ids"].shape == batch["labels"].shape and batch["lengths"].sum() == batch["input_ids"].numel()
        assert batch["input_ids"].max() < data.tokenizer.vocab_size


def test_rows_are_the_same_on_any_number_of_devices_and_again(tmp_path, overrides):
    data = build(tmp_path, *overrides)
    rows = data._rows("train", shuffle=True)
    one = rows_of(BatchLoader(rows, 6))
    many = [list(BatchLoader(rows, 2, rank=rank, world_size=3)) for rank in range(3)]
    together = torch.cat([torch.stack([b["input_ids"], b["labels"]], dim=1) for step in zip(*many, strict=True) for b in step])
    assert torch.equal(one, together)
    assert torch.equal(one, rows_of(BatchLoader(build(tmp_path, *overrides)._rows("train", shuffle=True), 6)))


def test_the_seed_makes_other_training_rows_and_leaves_validation(tmp_path, overrides):
    first, second = build(tmp_path, *overrides), build(tmp_path, *overrides, "seed=7")
    assert torch.equal(rows_of(first.val_dataloader()), rows_of(second.val_dataloader()))
    examples = [{data.example("train", row)[0].tobytes() for row in range(9)} for data in (first, second)]
    assert not examples[0] & examples[1]
    assert not examples[0] & {first.example("validation", row)[0].tobytes() for row in range(6)}


def test_rows_that_are_kept_are_those_that_are_made(tmp_path, overrides, monkeypatch):
    data = build(tmp_path, *overrides)
    kept = data._rows("train", shuffle=True)
    epochs = [rows_of(BatchLoader(kept, 4)) for _ in range(2)]
    monkeypatch.setattr(tasks, "KEPT_TOKENS", 0)
    made = data._rows("train", shuffle=True)
    assert torch.equal(epochs[0], epochs[1]) and torch.equal(epochs[0], rows_of(BatchLoader(made, 4)))
    assert kept._kept and not made._kept


def test_record_tells_all_that_the_rows_depend_on(tmp_path, overrides):
    data = build(tmp_path, *overrides)
    record = data.record()
    assert json.loads(json.dumps(record)) == record and record["source"]["kind"] == data.kind
    assert build(tmp_path, *overrides).record()["sha256"] == record["sha256"]
    for change in ("seed=7", "data.n_train=8", "data.seq_len=336" if data.kind == "passkey" else "data.seq_len=34"):
        assert build(tmp_path, *overrides, change).record()["sha256"] != record["sha256"]
    assert data.bytes_per_token("validation") is None


def test_reported_accuracy_is_that_of_the_answers(tmp_path, overrides):
    metrics = runner.train(config(tmp_path, *overrides))
    assert "val/bpb" not in metrics and metrics["val/ppl"] > 1
    loaded = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    right = []
    for input_ids, labels in rows_of(build(tmp_path, *overrides).val_dataloader()):
        answers = loaded.model(input_ids[None])[0].argmax(-1)
        right.append((answers == labels)[labels != -100])
    assert metrics["val/accuracy"] == pytest.approx(torch.cat(right).float().mean().item())


@pytest.mark.parametrize("task", ["recall", "passkey"])
def test_a_stopped_run_goes_on_exactly(tmp_path, task):
    overrides = passkeys(tmp_path) if task == "passkey" else [f"data={task}", *SMALL]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runner.train(config(whole, *overrides, "trainer.max_steps=12"))
    runner.train(config(parts, *overrides, "trainer.max_steps=8", "optimizer.total_steps=12"))
    runner.train(config(parts, *overrides, "trainer.max_steps=12", f"ckpt_path={parts / 'run' / 'checkpoints' / 'last.ckpt'}"))
    assert column(parts, "train/loss") == column(whole, "train/loss")


def test_other_rows_cannot_be_resumed(tmp_path, capsys):
    overrides = ["data=recall", *SMALL, "trainer.max_steps=2"]
    runner.train(config(tmp_path, *overrides))
    with pytest.raises(SystemExit), one_line_errors():
        last = tmp_path / "run" / "checkpoints" / "last.ckpt"
        runner.train(config(tmp_path, *overrides, "data.n_pairs=2", "trainer.max_steps=3", f"ckpt_path={last}"))
    assert "cannot resume in the middle of the data" in capsys.readouterr().err


@pytest.mark.slow
def test_copying_is_learnt(tmp_path):
    """Four tokens out of a vocabulary of six, by a model of two layers: more than a guess of one in six by far."""
    data = ["data=copying", "data.seq_len=8", "data.vocab_size=8", "data.batch_size=64", "data.n_train=4000", "data.n_validation=200"]
    training = ["model.n_layers=2", "trainer.max_steps=300", "trainer.val_check_interval=300", "optimizer.lr=1e-2"]
    metrics = runner.train(config(tmp_path, *data, *training))
    assert metrics["val/accuracy"] > 0.9


def test_lists_of_options_are_taken_in_turn(tmp_path):
    data = build(tmp_path, "data=recall", *SMALL, "data.n_pairs=[1,2,4]")
    counts = [(data.example("train", row)[1] != -100).sum() for row in range(6)]
    assert counts == [1, 2, 4, 1, 2, 4] and data.example_options()["n_pairs"] == 1


def test_passkey_rows_hold_the_text_and_mix_with_language_modelling(tmp_path):
    data = build(tmp_path, *passkeys(tmp_path, "data.share=0.5", "data.n_train=200"))
    text = (tmp_path / "text.txt").read_text()
    n_passkeys = 0
    for row in range(200):
        ids, labels = data.example("train", row)
        read = data.tokenizer.decode(ids)
        if "What is the pass key" in read:
            n_passkeys += 1
            (key,) = set(read.split("pass key is ")[1].split(".")[:1])
            assert read.endswith(f"The pass key is {key}") and (labels != -100).sum() == len(key) + 1
            assert read.split("\nThe pass key")[0].rpartition("\n")[2] in text
        else:
            assert read in text and list(labels[:-1]) == list(ids[1:])
    assert abs(n_passkeys - 100) < 4 * 50**0.5


def test_passkey_rows_take_the_numbers_of_distractors_in_turn(tmp_path):
    data = build(tmp_path, *passkeys(tmp_path, "data.distractors=[0,1,3]", "data.seq_len=600"))
    read = [data.tokenizer.decode(data.example("train", row)[0]) for row in range(6)]
    assert [text.count("Remember it") for text in read] == [1, 2, 4, 1, 2, 4]
    assert data.record()["source"]["distractors"] == [0, 1, 3]
    assert "distractors" not in build(tmp_path, *passkeys(tmp_path)).record()["source"]


def test_passkey_rows_take_the_numbers_of_questions_in_turn(tmp_path):
    data = build(tmp_path, *passkeys(tmp_path, "data.questions=[1,3]", "data.seq_len=900", "data.noise=0.5", "data.n_train=40"))
    texts = [data.tokenizer.decode(data.example("train", row)[0]) for row in range(40)]
    assert [text.count("What is the pass key") for text in texts] == [1, 3] * 20
    noisy = sum("The grass is green." in text for text in texts)
    assert abs(noisy - 20) < 4 * 10**0.5
    assert data.record()["source"]["questions"] == [1, 3] and data.record()["source"]["noise"] == 0.5
    assert not {"questions", "noise"} & build(tmp_path, *passkeys(tmp_path)).record()["source"].keys()
    with pytest.raises(Exception, match="data.questions=126 must be a number from 1 to 125, or a list of them"):
        build(tmp_path, *passkeys(tmp_path, "data.questions=126", "data.distractors=3"))


def test_all_tokens_of_a_passkey_row_can_be_targets_of_training_only(tmp_path):
    data = build(tmp_path, *passkeys(tmp_path, "data.targets=all", "data.depth=0.25"))
    ids, labels = data.example("train", 0)
    assert list(labels[:-1]) == list(ids[1:]) and labels[-1] == -100
    assert (data.example("validation", 0)[1] != -100).sum() < 8


def test_numbers_are_a_tokenizer():
    tokenizer = tokenizers.from_record(tokenizers.NumberTokenizer(30).record())
    assert tokenizer.encode(tokenizer.decode([3, 29, 0])) == [3, 29, 0]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["1 2", "7"])] == [[1, 2], [7]]
    for text in ("30", "a", "-1"):
        with pytest.raises(ValueError, match=f"'{text}' must be a number from 0 to 29"):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data=recall", "data.seq_len=63"], "data.seq_len=63 must be even"),
        (["data=recall", "data.n_pairs=17"], "data.seq_len=64 must be even and at least 4 n_pairs = 68"),
        (["data=recall", "data.n_pairs=[4,17]"], "at least 4 n_pairs = 68"),
        (["data=recall", "data.n_pairs=[]"], "data.n_pairs=[] must be"),
        (["data=recall", "data.n_train=0"], "data.n_train=0: must be a whole number of at least 1"),
        (["data=recall", "data.batch_size=many"], "data.batch_size='many': must be a whole number"),
        (["data=recall", "model=bert_tiny"], "data=recall must go with task=lm and a GPT"),
        (["data=recall", "data.vocab_size=4"], "data.vocab_size=4 must be at least"),
        (["data=copying", "data.n_tokens=40"], "data.n_tokens=40 must be from 1 to seq_len // 2 = 32"),
        (["data=induction", "data.seq_len=2"], "data.seq_len=2 must be at least 3"),
        (["passkey", "data.seq_len=64"], "data.seq_len=64 must be at least"),
        (["passkey", "data.seq_len=100000"], "data.seq_len=100000 must be below"),
        (["passkey", "data.share=0"], "data.share=0: must be a number above 0"),
        (["passkey", "data.targets=some"], "data.targets='some': must be answer or all"),
        (["passkey", "data.distractors=[0,99]"], "data.distractors=[0, 99] must be a number from 0 to 15"),
        (["passkey", "data.depth=2"], "data.depth=2: must be a number of at least 0 and at most 1 or null"),
        (["passkey", "data.keys=[9,1]"], "data.keys=[9, 1] must be"),
        (["passkey", "data.keys=[9]"], "data.keys=[9]: must be a list of 2 whole numbers"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, capsys, overrides, says):
    if overrides[0] == "passkey":
        overrides = passkeys(tmp_path, *overrides[1:])
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(config(tmp_path, *overrides))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
