"""Prompts and continuations as trees: the trie against one written out, losses and gradients against the sequences one by one, a run."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import column, compose_tiny
from torch.testing import assert_close

from attnzoo import runner
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.data.prompts import PromptFiles
from attnzoo.data.trees import PromptRows, continuations
from attnzoo.data.trie import pack
from attnzoo.models import BERT, GPT
from attnzoo.training.module import INPUTS, summed_loss
from attnzoo_kernels.tree.segments import check_tree
from benchmarks import tree_step
from benchmarks.accuracy import assert_accurate

sequence = st.lists(st.integers(1, 3), min_size=2, max_size=7)


@settings(max_examples=200, deadline=None)
@given(st.lists(sequence, min_size=1, max_size=8), st.integers(1, 3))
def test_a_trie_has_every_beginning_once(sequences, first_asked):
    packed = pack([np.array(ids) for ids in sequences], [first_asked] * len(sequences))
    prefixes = []
    for place, (token, before) in enumerate(zip(packed.tokens.tolist(), packed.before.tolist(), strict=True)):
        assert before < place
        prefixes.append((*(prefixes[before] if before >= 0 else ()), token))
    expected = {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}
    assert len(prefixes) == len(expected) and set(prefixes) == expected
    assert packed.depths.tolist() == [len(prefix) - 1 for prefix in prefixes]
    for prefix, count in zip(prefixes, packed.counts, strict=True):
        assert count == (len(prefix) > first_asked) * sum(tuple(ids[: len(prefix)]) == prefix for ids in sequences)
    # a segment begins with a tree, and where its parent has several children
    followers = [prefix[:-1] for prefix in prefixes]
    begins = [place for place, prefix in enumerate(prefixes) if len(prefix) == 1 or followers.count(prefix[:-1]) > 1]
    assert packed.starts.tolist() == begins and packed.lengths.sum() == len(prefixes)
    ends = np.cumsum(packed.lengths) - 1
    for start, parent in zip(packed.starts, packed.parents, strict=True):
        assert packed.before[start] == (ends[parent] if parent >= 0 else -1)
    check_tree(torch.from_numpy(packed.parents))


class Prompts:
    """The part of TokenStore that PromptRows needs; tokens repeat, so that continuations share beginnings."""

    def __init__(self, groups):
        documents = [ids for prompt, *texts in groups for ids in (prompt, *texts)]
        self.labels = np.array([i > 0 for group in groups for i in range(len(group))]).astype(np.int64)
        self.tokens = np.array([token for ids in documents for token in (*ids, 0)], np.uint16)
        self.lengths = np.array([len(ids) + 1 for ids in documents])
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])


GROUPS = [
    [(5, 1, 2, 3), (4, 4, 6), (4, 4), (7,), (4, 4, 6)],  # one is the beginning of another, and one is there twice
    [(5, 1, 2), (3, 4), (1, 1, 1, 1, 1, 1, 1, 1, 1)],  # begins like the first; the second is cut
    [(9,) * 12, (1,)],  # leaves no room
    [(8, 8), (8, 8, 8, 2)],
]
SEQ_LEN = 10


def rows(**options):
    settings = {"pad_id": 0, "seed": 0, "shuffle": False, "trees": True, "predict_prompts": False} | options
    return PromptRows(Prompts(GROUPS), SEQ_LEN, **settings)


def build(cls=GPT, attention=FlashAttention, **options):
    torch.manual_seed(0)
    return cls(vocab_size=11, dim=16, n_layers=2, n_heads=2, train_context=SEQ_LEN, attention=attention, **options).double()


@pytest.mark.parametrize("positions", ("learned", "rotary"))
@pytest.mark.parametrize("predict_prompts", (False, True))
def test_loss_and_gradients_are_those_of_the_sequences_one_by_one(positions, predict_prompts):
    model = build(positions=positions, attention_temperature="log")
    expected, count = torch.zeros((), dtype=torch.float64), 0
    for prompt, *texts in GROUPS:
        for text in texts:
            ids = torch.tensor([(*prompt, *text, 0)[:SEQ_LEN]])
            first = 1 if predict_prompts else len(prompt)
            if len(prompt) < SEQ_LEN:
                expected = expected + F.cross_entropy(model(ids)[0, first - 1 : -1], ids[0, first:], reduction="sum")
                count += ids.shape[1] - first
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    for trees in (True, False):
        source = rows(trees=trees, predict_prompts=predict_prompts)
        batch = source.batch(0, np.arange(source.n_rows))
        for fused in (False, True):
            loss, counted = summed_loss(model, batch, fused)
            assert counted == count
            assert_close(loss, expected, rtol=1e-10, atol=1e-10)
            for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), gradients, strict=True):
                assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_the_kernels_keep_the_rule():
    def run(dtype, impl, trees):
        source, model = rows(trees=trees), build(attention=partial(FlashAttention, impl=impl)).to("cuda", dtype)
        batch = {name: value.cuda() if torch.is_tensor(value) else value for name, value in source.batch(0, np.arange(3)).items()}
        loss, _ = summed_loss(model, batch)
        names, parameters = zip(*model.named_parameters(), strict=True)
        return {"loss": loss} | dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    exact = run(torch.float64, "reference", False)
    assert_accurate(run(torch.float32, None, True), run(torch.float32, "reference", False), exact)


def test_a_batch_says_what_it_holds():
    source = rows()
    assert (source.n_rows, source.n_left_out) == (3, 1)
    batch = source.batch(0, np.arange(3))
    # every token of the two tries once, segment by segment
    assert batch["n_tokens"] == len(batch["input_ids"]) == 3 + 7 + 1 + 1 + 1 + 1 + 1 + 2 + 2 + 7
    assert batch["n_targets"] == len(batch["labels"]) == len(batch["weights"]) < batch["weights"].sum()
    lengths, shared = batch["lengths"], batch["shared"]
    assert (lengths - shared).sum() == batch["n_tokens"] and lengths.max() == SEQ_LEN
    # the work: paths, less what they share
    flops = partial(build().flops, n_logits=0)
    pair = flops([2]) - 2 * flops([1])
    token, pairs = flops([1]) - pair, (batch["position_ids"] + 1).sum().item()
    assert flops(lengths.tolist()) - flops(shared.tolist()) == pytest.approx(batch["n_tokens"] * token + pairs * pair)


def test_a_batch_of_nothing_counts_nothing():
    batch = rows().batch(0, np.array([3, 4]))
    loss, count = summed_loss(build(), batch)
    assert loss == count == batch["n_tokens"] == batch["n_targets"] == 0


def test_positions_are_found_without_position_ids():
    batch = rows().batch(0, np.arange(3))
    model, inputs = build(), {name: batch[name] for name in INPUTS if name in batch}
    assert_close(model(batch["input_ids"], **{**inputs, "position_ids": None}), model(batch["input_ids"], **inputs))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (partial(build, attention=SDPAttention), "attention=sdpa takes no trees of shared prefixes; set data.trees=false, or"),
        (partial(build, attention=partial(FlashAttention, window_size=(4, 0))), r"attention.window_size=\[4, 0\]: must be \[-1, 0\] in"),
        (partial(build, positions="alibi"), "positions=alibi: must be learned, rotary or none in trees"),
        (partial(build, attention_dropout=0.1), "attention_dropout=0.1: must be 0 in trees"),
        (partial(build, cls=BERT), "parents: trees of shared prefixes are for causal models"),
    ],
)
def test_what_takes_no_trees_says_so(build, says):
    batch = rows().batch(0, np.arange(3))
    with pytest.raises(ValueError, match=says):
        summed_loss(build(), batch)


def numbers(folder, *overrides):
    return compose_tiny(folder, "data=continuations", "data.paths=null", "data.seq_len=64", "data.n_train=24", "data.n_validation=5",
                        "data.n_numbers=6", "trainer.max_steps=3", "trainer.val_check_interval=3", "trainer.precision=64-true", *overrides)


@pytest.mark.slow
def test_a_run_on_trees_is_one_on_sequences_by_themselves(tmp_path):
    metrics = [runner.train(numbers(tmp_path / str(trees), f"data.trees={trees}")) for trees in (True, False)]
    losses = [[float(loss) for loss in column(tmp_path / str(trees), "train/loss")] for trees in (True, False)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert metrics[0]["val/loss"] == pytest.approx(metrics[1]["val/loss"], rel=1e-9)


def test_a_run_is_refused_before_it_begins(tmp_path):
    with pytest.raises(ValueError, match="attention=sdpa takes no trees of shared prefixes"):
        runner.train(numbers(tmp_path, "attention=sdpa"))
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="positions=alibi: must be"):
        runner.train(numbers(tmp_path / "alibi", "model.positions=alibi"))
    with pytest.raises(ValueError, match="data=continuations must go with task=lm and a GPT: .*; got task 'mlm'"):
        continuations(objective="mlm", seq_len=64, batch_size=2)


def module(folder, lines, *overrides):
    (folder / "lines.jsonl").write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    paths = f"data.paths=[{folder / 'lines.jsonl'}]"
    data = instantiate(compose_tiny(folder, "data=continuations", paths, "data.val_fraction=0.5", *overrides).data, _convert_="all")
    data.setup()
    return data


def test_json_lines_are_split_by_prompt_and_read_whole(tmp_path):
    lines = [{"prompt": f"{n % 8}?", "continuations": [f" {n}.", f" {n}!"], "score": n} for n in range(16)]
    data = module(tmp_path, [*lines, ""])
    read = {split: [data.tokenizer.decode(ids[:-1]) for ids in data.documents(split)["input_ids"]] for split in ("train", "validation")}
    assert sorted(sum(read.values(), [])) == sorted(f"{n % 8}? {n}{end}" for n in range(16) for end in ".!")
    assert not {text[0] for text in read["train"]} & {text[0] for text in read["validation"]}
    assert data.documents("train")["n_bytes"][0] == len(read["train"][0])
    batch = next(iter(data.val_dataloader()))
    assert batch["n_targets"] < batch["weights"].sum()


def test_halves_of_characters_are_replaced_and_counted(tmp_path):
    """As a text that was cut in the middle of an emoji has them."""
    data = module(tmp_path, [{"prompt": f"{n} \ud83d\ude00 \ud83d", "continuations": ["\ude00", "\ud83d\ude00"]} for n in range(16)])
    texts = [data.tokenizer.decode(ids[:-1]) for split in ("train", "validation") for ids in data.documents(split)["input_ids"]]
    assert sorted(texts) == sorted(f"{n} 😀 \ufffd{end}" for n in range(16) for end in "\ufffd😀")
    assert sum(split["decoding_errors_replaced"] for split in data.record()["splits"].values()) == 32


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'prompt'", r"data.paths: line 2 of '.*lines.jsonl' must be JSON"),
        ({"prompt": "a"}, "line 2 of .* must be an object with a text for prompt and a list of texts for continuations"),
        ({"prompt": "a", "continuations": "b"}, "line 2 of .* must be an object"),
        ({"prompt": "", "continuations": ["b"]}, "none of them empty"),
        ({"prompt": "a", "continuations": []}, "none of them empty"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, says):
    with pytest.raises(ValueError, match=says):
        module(tmp_path, [{"prompt": "a", "continuations": ["b"]}, line])


def test_a_wrong_line_for_validation_names_its_key(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "continuations": ["b"]}\n')
    (tmp_path / "val.jsonl").write_text("no JSON\n")
    source = PromptFiles(str(tmp_path / "train.jsonl"), str(tmp_path / "val.jsonl"))
    with pytest.raises(ValueError, match="data.val_paths: line 1 of '.*val.jsonl' must be JSON"):
        list(source.documents())


@pytest.mark.slow
def test_a_step_is_measured_and_checked(capsys):
    assert tree_step.main(["--dry-run"]) == 0
    assert "trees-reference" in capsys.readouterr().out


def test_prompts_that_leave_no_room_are_left_out(tmp_path, caplog):
    long, short = ([{"prompt": letter * n, "continuations": ["b"]} for letter in "abcdefgh"] for n in (40, 20))
    with pytest.raises(ValueError, match="data.seq_len=32 must be above the length of a prompt"):
        module(tmp_path, long)
    data = module(tmp_path, [*long, *short])
    assert sum(len(data.documents(split)) for split in ("train", "validation")) == len(short)
    assert "do not leave room in data.seq_len=32 and are left out" in caplog.text
