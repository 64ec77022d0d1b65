"""task=classification: the classifier over every variant, labelled rows, and runs from folders, data sets and ListOps."""

import json

import numpy as np
import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from tiny_run import ROOT, column
from torch.testing import assert_close

from attnzoo import checkpoint, runner
from attnzoo.batch import IGNORED
from attnzoo.models import BERTClassifier, from_config
from attnzoo.run.command_line import one_line_errors
from attnzoo.training.loggers import read_metrics

CONFIGS = ROOT / "configs"
SUPPORTS = {path.stem: get_class(OmegaConf.load(path)["_target_"]).supports for path in sorted((CONFIGS / "attention").glob("*.yaml"))}
VARIANTS = [name for name, can in SUPPORTS.items() if can.bidirectional and can.packed]
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "train_context": 16, "n_classes": 3}
LENGTHS = [7, 1, 12, 16]


def build(variant="flash", pooling="cls", **options):
    torch.manual_seed(0)
    attention = OmegaConf.to_container(OmegaConf.load(CONFIGS / "attention" / f"{variant}.yaml"))
    model = {"_target_": "attnzoo.models.BERTClassifier", "pooling": pooling, **SIZES, **options}
    return from_config(model, attention).double().eval()


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def packed(sequences):
    lengths = torch.tensor([len(s) for s in sequences])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return {"input_ids": torch.cat(sequences), "cu_seqlens": cu_seqlens, "max_seqlen": 16}


def padded(sequences):
    mask = torch.arange(16) < torch.tensor([len(s) for s in sequences])[:, None]
    ids = torch.full(mask.shape, 5)
    ids[mask] = torch.cat(sequences)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.filterwarnings("ignore:.*keeps every block of the model's context")
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_padded_and_single_sequences_get_the_same_scores(variant, pooling, sequences):
    model = build(variant, pooling)
    alone = torch.cat([model(ids[None]) for ids in sequences])
    assert alone.shape == (len(LENGTHS), 3)
    assert_close(model(**packed(sequences)), alone)
    assert_close(model(**padded(sequences)), alone)
    assert_close(model(**padded(sequences), max_tokens=sum(LENGTHS) + 3), alone)
    filled = packed(sequences)
    assert_close(model(**filled | {"input_ids": torch.cat([filled["input_ids"], torch.full((9,), 5)])}), alone)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_gradients_of_packed_and_padded_agree_and_reach_everything(pooling, sequences):
    gradients = []
    for batch in (packed(sequences), padded(sequences)):
        model = build(pooling=pooling)
        model(**batch).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None and g.abs().sum() > 0 for g in gradients[0].values())
    assert_close(gradients[0], gradients[1])


def test_cls_reads_the_first_token_and_mean_all(sequences):
    changed = sequences[0].clone()
    changed[3] = (changed[3] + 1) % SIZES["vocab_size"]
    states = []
    for pooling in ("cls", "mean"):
        model = build(pooling=pooling, n_layers=1)
        model.blocks[0].attention.o_proj.weight.data.zero_()  # tokens see nothing of each other
        states.append([model(ids[None]) for ids in (sequences[0], changed)])
    assert_close(*states[0])
    assert not torch.allclose(*states[1])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_sequence_without_tokens_leaves_the_others_alone(pooling, sequences):
    model = build(pooling=pooling)
    empty = torch.empty(0, dtype=torch.int64)
    scores = model(**packed([empty, sequences[0], empty, sequences[1], empty]))
    assert_close(scores[[1, 3]], model(**packed(sequences[:2])))
    assert_close(scores[0], scores[4])


def test_head_has_its_own_parameters_only():
    names = {name.partition(".")[0] for name, _ in build().named_parameters()}
    assert names == {"token_embedding", "blocks", "final_norm", "pooler", "classifier"}
    assert "pooler" not in {name.partition(".")[0] for name, _ in build(pooling="mean").named_parameters()}
    assert build().n_parameters == sum(p.numel() for p in build().parameters())


@pytest.mark.parametrize(("options", "message"), [({"pooling": "max"}, "task.pooling='max'"), ({"n_classes": 1}, "n_classes=1")])
def test_bad_model_options(options, message):
    with pytest.raises(ValueError, match=message):
        BERTClassifier(**{**SIZES, **options}, attention=None)


# runs

TINY = [
    "task=classification", "model=bert_tiny", "model.dim=32", "model.n_layers=1", "model.n_heads=2", "data.seq_len=32", "data.batch_size=8",
    "trainer=cpu", "trainer.precision=32", "trainer.max_steps=30", "trainer.val_check_interval=10", "trainer.log_every_n_steps=1",
    "optimizer.warmup_steps=2", "optimizer.lr=1e-2", "callbacks.progress=null",
]  # fmt: skip


@pytest.fixture
def reviews(tmp_path):
    """Forty texts; the class stands in the text, at one place or another."""
    rng = np.random.default_rng(0)
    for i in range(40):
        name = ("bad", "good")[i % 2]
        words = ["the", "film", "was", "long", "red"][: rng.integers(1, 6)]
        words.insert(int(rng.integers(len(words) + 1)), {"bad": "--", "good": "++"}[name])
        folder = tmp_path / "reviews" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(" ".join(words))
    return tmp_path / "reviews"


def compose(folder, *overrides):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", overrides=[*TINY, f"data.cache_dir={folder / 'cache'}", f"run_dir={folder / 'run'}", *overrides])


def folders(reviews, *overrides):
    return ["data=text_classification", f"data.path={reviews}", "data.val_fraction=0.3", *overrides]


def build_data(folder, *overrides):
    from hydra.utils import instantiate

    data = instantiate(compose(folder, *overrides).data, _convert_="all")
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.parametrize("options", [[], ["data.packed=false", "task.pooling=mean"]], ids=["packed", "padded"])
def test_a_run_learns_and_its_checkpoint_repeats_the_accuracy(tmp_path, reviews, options):
    cfg = compose(tmp_path, *folders(reviews, *options))
    metrics = runner.train(cfg)
    assert metrics["val/accuracy"] == 1.0 and metrics["val/loss"] < 0.3 and "val/ppl" not in metrics
    assert "good" in (tmp_path / "run" / "sample.txt").read_text()
    loaded = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert loaded.task == "classification" and loaded.record["data"]["classes"] == ["bad", "good"]
    data = build_data(tmp_path, *folders(reviews, *options))
    right = count = 0
    for batch in data.val_dataloader():
        inputs = {key: batch[key] for key in ("input_ids", "cu_seqlens", "max_seqlen", "attention_mask") if key in batch}
        right += (loaded.model(**inputs).argmax(-1) == batch["labels"]).sum().item()
        count += len(batch["labels"])
    assert right == count == data.record()["splits"]["validation"]["documents"]


def test_accuracy_is_the_share_of_right_answers_over_all_batches(tmp_path, reviews):
    cfg = compose(tmp_path, *folders(reviews, "trainer.max_steps=3", "trainer.val_check_interval=3", "data.eval_batch_size=5"))
    reported = runner.train(cfg)["val/accuracy"]
    model = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt").model
    answers = [
        (model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], max_seqlen=batch["max_seqlen"]).argmax(-1) == batch["labels"])
        for batch in build_data(tmp_path, *folders(reviews, "data.eval_batch_size=7")).val_dataloader()
    ]
    assert reported == pytest.approx(torch.cat(answers).float().mean().item())


def test_a_stopped_run_goes_on_exactly(tmp_path, reviews):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runner.train(compose(whole, *folders(reviews, "trainer.max_steps=9")))
    runner.train(compose(parts, *folders(reviews, "trainer.max_steps=5", "optimizer.total_steps=9")))
    last = parts / "run" / "checkpoints" / "last.ckpt"
    runner.train(compose(parts, *folders(reviews, "trainer.max_steps=9", f"ckpt_path={last}")))
    assert column(parts, "train/loss") == column(whole, "train/loss")
    losses = read_metrics(parts / "run" / "metrics.csv")["train/loss"]
    assert [step for step, _ in losses] == list(range(1, 10))


def test_rows_are_framed_cut_and_the_same_packed_and_padded(tmp_path, reviews):
    data = build_data(tmp_path, *folders(reviews, "data.seq_len=12", "data.shuffle=false"))
    other = build_data(tmp_path, *folders(reviews, "data.seq_len=12", "data.shuffle=false", "data.packed=false"))
    for batch, rows in zip(data.train_dataloader(), other.train_dataloader(), strict=True):
        assert torch.equal(batch["input_ids"], rows["input_ids"][rows["attention_mask"]]) and torch.equal(batch["labels"], rows["labels"])
        starts = batch["cu_seqlens"][:-1].long()
        assert (batch["input_ids"][starts] == data.tokenizer.eos_id).all()
        assert batch["lengths"].max() == 12 and rows["max_tokens"] == batch["n_tokens"] == len(batch["input_ids"])
    texts = {data.tokenizer.decode(ids) for ids in data.documents("validation")["input_ids"]}
    assert texts == {d["text"][:11] for d in data.source.documents() if d["split"] == "validation"}


@pytest.mark.parametrize("task", ["classification", "mlm"])
def test_balanced_steps_have_one_shape_and_hold_the_same(tmp_path, task):
    for i in range(90):
        folder = tmp_path / "texts" / "xy"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text("a word " * (1 + i * 7 % 40))
    options = ["data=text_classification", f"data.path={tmp_path / 'texts'}", f"task={task}", "data.batch_size=8", "data.seq_len=200"]
    balanced, plain = (build_data(tmp_path, *options, f"data.batching={batching}") for batching in ("balanced", "random"))
    batches = list(balanced.train_dataloader())
    (shapes,) = {tuple((key, value.shape) for key, value in batch.items() if isinstance(value, torch.Tensor)) for batch in batches}
    assert len(plain_shapes := {batch["input_ids"].shape for batch in plain.train_dataloader()}) > 1
    assert dict(shapes)["input_ids"][0] < max(plain_shapes)[0]
    rows, other = balanced._rows("train", shuffle=True), plain._rows("train", shuffle=True)
    for epoch in range(2):
        order = rows.order(epoch, 8)
        assert sorted(order) == list(range(rows.n_rows)) and order.tolist() != rows.order(epoch + 1, 8).tolist()
    one, two = (each.batch(0, order[:8]) for each in (rows, other))
    n, targets = two["n_tokens"], two["n_targets"]
    assert (one["n_tokens"], one["n_targets"]) == (n, targets) and n < len(one["input_ids"]) == len(one["position_ids"])
    assert all(torch.equal(one[key][:n], two[key]) for key in ("input_ids", "position_ids"))
    assert torch.equal(one["cu_seqlens"], two["cu_seqlens"])
    assert (one["input_ids"][n:] == balanced.tokenizer.pad_id).all() and not one["position_ids"][n:].any()
    assert torch.equal(one["labels"][:len(two["labels"])], two["labels"])
    if task == "mlm":
        assert torch.equal(one["logits_at"][:targets], two["logits_at"]) and len(one["logits_at"]) > targets
        assert (one["labels"][one["logits_at"][targets:]] == IGNORED).all()


@pytest.mark.parametrize("options", [
    ["data.batching=balanced"], ["data.batching=balanced", "task=mlm"], ["data.batching=scheduled", "data.packed=false"],
    ["data.batching=by_length", "data.packed=false"],
])  # fmt: skip
def test_a_run_with_rows_put_together_by_length_goes_on_exactly(tmp_path, reviews, options):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runner.train(compose(whole, *folders(reviews, "trainer.max_steps=4", *options)))
    runner.train(compose(parts, *folders(reviews, "trainer.max_steps=2", "optimizer.total_steps=4", *options)))
    last = parts / "run" / "checkpoints" / "last.ckpt"
    runner.train(compose(parts, *folders(reviews, "trainer.max_steps=4", f"ckpt_path={last}", *options)))
    assert column(parts, "train/loss") == column(whole, "train/loss")


def test_a_tokenizer_with_cls_and_sep_frames_with_both(tmp_path, reviews):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {name: i for i, name in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "the", "film", "++", "--"])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    data = build_data(tmp_path, *folders(reviews, f"data.tokenizer={tmp_path / 'words.json'}"))
    batch = next(iter(data.train_dataloader()))
    cu = batch["cu_seqlens"].long()
    assert (batch["input_ids"][cu[:-1]] == words["[CLS]"]).all() and (batch["input_ids"][cu[1:] - 1] == words["[SEP]"]).all()


@pytest.mark.parametrize("named", [False, True])
def test_a_labelled_data_set(tmp_path, named):
    rows = [{"review": f"text {i}", "stars": ("low", "high")[i % 2] if named else i % 3 + 8} for i in range(30)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    options = ["data=text_classification", "data.name=json", f"data.data_files={tmp_path / 'rows.json'}", "data.val_fraction=0.3"]
    data = build_data(tmp_path, *options, "data.column=review", "data.label_column=stars")
    assert data.classes == (["high", "low"] if named else ["8", "9", "10"])
    of_text = {row["review"]: str(row["stars"]) for row in rows}
    found = {}
    for split in ("train", "validation"):
        for row in data.documents(split):
            found[data.tokenizer.decode(row["input_ids"])] = data.classes[row["label"]]
    assert found == of_text


LISTOPS = [
    "data=listops", "data.min_length=3", "data.max_length=20", "data.seq_len=20", "data.n_train=40", "data.n_validation=10", "data.n_test=6"
]  # fmt: skip


def test_listops_has_three_splits_and_names_its_classes(tmp_path):
    data = build_data(tmp_path, *LISTOPS)
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    assert [sum(len(batch["labels"]) for batch in loader) for loader in loaders] == [40, 10, 6] and data.classes == list("0123456789")
    other = build_data(tmp_path, *LISTOPS, "seed=7")
    for one, two in zip(data.val_dataloader(), other.val_dataloader(), strict=True):
        assert torch.equal(one["input_ids"], two["input_ids"])
    assert runner.train(compose(tmp_path, *LISTOPS, "trainer.max_steps=2"))["val/accuracy"] <= 1


ROWS = ["data=text_classification", "data.name=json", "data.data_files={rows}"]


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    return folder


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data=text_classification"], "data.path, data.name: one of them"),
        (["data=text_classification", "data.path={empty}"], "has no files"),
        (["data=text_classification", "data.path={flat}"], "must hold folders, one for each class"),
        (["data=text_classification", "data.path={single}"], "at least two classes, found ['only']"),
        (["data=text_classification", "data.path=/does/not/exist"], "data.path: '/does/not/exist' does not exist"),
        (["data=text_classification", "data.path={two}", "data.val_path={single}"], "class 'only' has no text in the train split"),
        ([*ROWS], "data.label_column='label' is not in 'json'"),
        ([*ROWS, "data.label_column=text", "data.column=other"], "data.column='other' is not in 'json'"),
        (["data=text_classification", "data.path={two}", "data.val_fraction=2"], "data.val_fraction=2"),
        (["data=text_classification", "data.path={two}", "task.pooling=max"], "task.pooling='max'"),
        (["data=text_classification", "data.path={two}", "task=lm", "model=gpt_tiny"],
         "data=text_classification must go with task=classification"),
        (["data=text_classification", "data.path={two}", "model=gpt_tiny"], "take model=bert_tiny"),
        (["data=text_classification", "data.path={two}", "data.batching=balanced", "data.packed=false"],
         "data.batching=balanced must go with data.packed=true"),
        (["data=text", "data.paths=[{two}]"], "texts with classes are data=text_classification and data=listops"),
        (["data=listops", "data.n_train=0"], "data.n_train=0"),
        (["data=listops", "data.min_length=1999"], "data.min_length=1999"),
        (["data=listops", "data.max_depth=2"], "data.min_length=500 must be below 12"),
        (["data=listops", "data.max_args=1"], "data.max_args=1"),
        (["data=listops", "data.seq_len=1"], "data.seq_len=1: must be a whole number of at least 2"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, capsys, overrides, says):
    places = {
        "flat": write(tmp_path / "flat", "a.txt", "b.txt"),
        "single": write(tmp_path / "single", "only/a.txt", "only/b.txt"),
        "two": write(tmp_path / "two", "x/a.txt", "x/b.txt", "y/a.txt", "y/b.txt"),
        "empty": tmp_path / "empty",
        "rows": tmp_path / "rows.json",
    }
    places["empty"].mkdir()
    places["rows"].write_text('{"text": "a"}\n')
    with pytest.raises(SystemExit), one_line_errors():
        runner.train(compose(tmp_path, "data.seq_len=32", *(override.format(**places) for override in overrides)))
    line = capsys.readouterr().err.rpartition("error: ")[2].strip()  # the library's progress bars stand before it
    assert says in line and "\n" not in line
