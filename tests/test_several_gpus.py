"""`trainer.context_parallel`: devices that share sequences train as one, and what does not go with it is refused."""

import socket

import context_runs
import pytest
import torch
from tiny_run import column, compose_tiny

from attnzoo import runner
from attnzoo.errors import UserError
from attnzoo.models import from_config
from attnzoo.run import checks

FLASH = "attnzoo.attention.flash.FlashAttention"


@pytest.mark.slow
def test_four_ranks_train_as_one(tmp_path):
    """Two groups of two and one of four; dense, packed, accumulated, with activations computed again; GPT and BERT."""
    for name, (sharing, options) in context_runs.RUNS.items():
        rows = [f"data.batch_size={4 // sharing}"]
        options = [option for option in options if not option.startswith("batch_tokens")]
        rows = ["data.batch_size=2"] if name == "accumulated" else rows
        runner.train(compose_tiny(tmp_path, *context_runs.COMMON, *options, *rows, f"run_dir={tmp_path}/one-{name}/run"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context_runs.run(4, tmp_path, port)
    for name in context_runs.RUNS:
        for metric in ("train/loss", "val/loss", "train/grad_norm"):
            found, wanted = ([float(value) for value in column(tmp_path / folder, metric)] for folder in (name, f"one-{name}"))
            assert len(found) == len(wanted) > 0
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options, reason", (
    (["compile=true"], "does not go with compile; set compile=false"),
    (["model=bert_tiny", "data.packed=false"], "does not go with data.packed=false; set data.packed=true"),
    (["data=continuations", "data.paths=null"], "does not go with data=continuations; set data=text"),
    (["trainer.context_parallel=0"], "trainer.context_parallel=0: must be a whole number of at least 1"),
))
def test_what_does_not_go_with_it_is_refused(tmp_path, options, reason):
    with pytest.raises((UserError, ValueError), match=reason):
        checks.check_training(compose_tiny(tmp_path, "trainer.context_parallel=2", *options))


def test_devices_must_be_groups(tmp_path):
    with pytest.raises(UserError, match="context_parallel=2 must divide the 1 devices of the run"):
        runner.train(compose_tiny(tmp_path, "trainer.context_parallel=2"))


@pytest.mark.parametrize("kind, model, attention, packed, reason", (
    ("BERT", {}, {"_target_": "attnzoo.attention.sdpa.SDPAttention"}, True, "cannot read packed sequences by attention=sdpa; set trainer."),
    ("GPT", {}, {"_target_": "attnzoo.attention.block_sparse.BlockSparseAttention"}, True, "set data.cross_documents=true"),
    ("GPT", {"attention_dropout": 0.1}, {"_target_": FLASH}, True, "needs model.attention_dropout=0, got 0.1"),
    ("GPT", {"rope_scaling": "dynamic", "rope_factor": 2.0}, {"_target_": FLASH}, True, "rope_scaling=dynamic looks at the longest"),
    ("BERT", {"positions": "alibi"}, {"_target_": FLASH}, True, "does not go with model.positions=alibi in a bidirectional model"),
    ("BERT", {}, {"_target_": FLASH, "window_size": [4, 4]}, True, r"window_size=\[-1,-1\] in a bidirectional model, got \[4, 4\]"),
    ("BERT", {}, {"_target_": "attnzoo.attention.dual_chunk.DualChunkAttention"}, True, "dual_chunk goes with it in a causal model only"),
))
def test_layers_that_do_not_go_with_it_are_refused(kind, model, attention, packed, reason):
    built = from_config({"_target_": f"attnzoo.models.{kind}", "vocab_size": 19, "dim": 16, "n_layers": 1, "n_heads": 2,
                         "train_context": 512, **model}, attention)
    with pytest.raises(ValueError, match=f"trainer.context_parallel: .*{reason}"):
        built.blocks[0].attention.check_context_parallel(packed)
