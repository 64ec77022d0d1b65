"""What each rank of tests/test_several_gpus.py does: models and runs by ranks that share sequences."""

import itertools
import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from commands import PRELOAD

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (  # with positions and kinds of model that go with them
    ("flash", {"window_size": [40, 0], "positions": "alibi", "attention_temperature": "ssmax"}),
    ("flash", {"softcap": 2.0}),
    ("flash", {"attention_dropout": 0.3, "window_size": [20, 0]}),
    ("flash", {"attention_dropout": 0.3, "kind": "BERT", "positions": "learned"}),
    ("differential", {"version": 2}),
    ("distance_bias", {"max_distance": 70}),
    ("forgetting", {"attention_gate": "head"}),
    ("sigmoid", {"sigmoid_bias": "length", "kind": "BERT", "positions": "learned"}),
    ("dual_chunk", {"chunk_size": 16, "temperature": "yarn"}),
    ("two_frame", {"method": "leaky_rerope", "window": 20}),
    ("mla", {"q_lora_rank": 6}),
    ("sdpa", {"positions": "alibi", "packed": False}),
    ("block_sparse", {"block": 16, "pattern": {"name": "longformer", "window": 1, "n_global": 1}}),
)
OF_MODEL = ("kind", "positions", "attention_temperature", "attention_gate", "attention_dropout")
RUNS = {  # by the ranks that share a sequence
    "packed": (2, ["data.seq_len=300", "data.batch_size=1", "trainer.max_steps=40", "optimizer.lr=1e-2"]),
    "accumulated": (4, ["data.seq_len=600", "data.batch_size=1", "batch_tokens=1200", "data.cross_documents=true",
                        "activation_checkpointing=1", "trainer.max_steps=4"]),
    "dealt": (2, ["data.seq_len=1000", "data.batch_size=1", "trainer.max_steps=3"]),  # four chunks a rank
    "dropout": (4, ["data.seq_len=600", "data.batch_size=1", "model.attention_dropout=0.2", "activation_checkpointing=1",
                    "trainer.max_steps=4"]),
    "bert": (2, ["model=bert_tiny", "data.seq_len=300", "data.batch_size=1", "trainer.max_steps=4"]),
}
COMMON = ["trainer.precision=64-true", "callbacks.sample=null", "callbacks.plot=null", "model.dim=16", "trainer.val_check_interval=40"]


def main(rank: int, ranks: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    # as torchrun sets them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    from tiny_run import compose_tiny

    from attnzoo import runner

    for name, (sharing, options) in RUNS.items():
        several = ["trainer=ddp", "trainer.accelerator=cpu", f"trainer.devices={ranks}", f"trainer.context_parallel={sharing}"]
        runner.train(compose_tiny(Path(folder), *several, *COMMON, *options, f"run_dir={folder}/{name}/run"))
    check_evaluation(ranks)
    for name, options in MODELS:
        for packed in (True, False)[options.get("packed") is False :]:
            check_model(name, {key: value for key, value in options.items() if key != "packed"}, packed)


def check_model(name: str, options: dict[str, Any], packed: bool) -> None:
    """Loss and gradients of all parameters against one process, also by groups of heads where the layer takes them."""
    from attnzoo.attention import context
    from attnzoo.attention.base import Attention
    from attnzoo.models import from_config
    from attnzoo_kernels.context_parallel import ContextParallel
    from attnzoo_kernels.context_placement import deal
    from attnzoo_kernels.dropout import new_rng_state

    of_model = {key: value for key, value in options.items() if key in OF_MODEL}
    kind = of_model.pop("kind", "GPT")
    classes = {"sdpa": "SDP", "two_frame": "TwoFrame", "flash": "Flash", "dual_chunk": "DualChunk", "block_sparse": "BlockSparse",
               "distance_bias": "DistanceBias", "mla": "ML"}
    attention = {"_target_": f"attnzoo.attention.{name}.{classes.get(name, name.capitalize())}Attention",
                 **{key: value for key, value in options.items() if key not in OF_MODEL}}
    torch.manual_seed(0)
    model = from_config({"_target_": f"attnzoo.models.{kind}", "vocab_size": 19, "dim": 16, "n_layers": 2, "n_heads": 2,
                         "train_context": 64, "max_positions": 256, **of_model}, attention).double().train()
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        block.attention.check_context_parallel(packed)
    ids, targets = torch.randint(19, (2, 2, 101))
    inputs: dict[str, Any] = {}
    if packed:
        ids, targets = ids.flatten(), targets.flatten()
        lengths = (1, 40, 14, 145)  # and tokens behind them
        inputs = {"cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), "max_seqlen": 145}
    targets[..., -1] = -100
    if "attention_dropout" in of_model:
        inputs["dropout_states"] = torch.stack([new_rng_state(ids.device) for _ in model.blocks])

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, tuple(model.parameters()), allow_unused=True))

    def loss(ids: torch.Tensor, targets: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(ids, **inputs).flatten(0, -2), targets.flatten(), reduction="sum")

    expected = loss(ids, targets, **inputs)
    wanted_gradients = gradients(expected)
    placements: list[dict[str, Any]] = [{"chunk": 26 if packed else 13}]
    if packed:
        owned = deal(len(ids), lengths, dist.get_world_size(), causal=kind == "GPT", chunks=4, chunk=13)
        placements.append({"chunk": 13, "owned": owned, "documents": lengths})
    for groups, placed in itertools.product((1, 2), placements):
        plan = ContextParallel(ids.shape[-1], **placed)
        with mock.patch.object(context, "GROUPS", groups):
            own = loss(plan.shard(ids, -1), plan.shard(targets, -1, -100), context=plan, **inputs)
        total = own.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), rtol=0, atol=1e-9)
        for found, wanted in zip(gradients(own), wanted_gradients, strict=True):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                dist.all_reduce(found)
                where = partial("{}, {}, {} groups: {}".format, name, placed, groups)
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=where)


def check_evaluation(ranks: int) -> None:
    """Long rows are read by all processes, short ones by each, with the losses of one."""
    from attnzoo.evaluation import together
    from attnzoo.evaluation.perplexity import Window, score
    from attnzoo.models import from_config

    torch.manual_seed(0)
    length = 256 * ranks + 40
    model = from_config({"_target_": "attnzoo.models.GPT", "vocab_size": 19, "dim": 16, "n_layers": 2, "n_heads": 2, "train_context": 64},
                        {"_target_": "attnzoo.attention.flash.FlashAttention"}).eval()
    read = []
    model.register_forward_pre_hook(lambda module, inputs, options: read.append("context" in options), with_kwargs=True)
    documents = {0: torch.randint(19, (2 * length,)).tolist(), 1: torch.randint(19, (length + 5,)).tolist()}
    for n in (length, 50):
        windows = [Window(0, n // 2, n + 1, start=0), Window(1, 3, n, start=0), Window(0, n + 6, n + 9, start=8)]
        found = score(model, documents, windows, n, batch_tokens=2 * n)
        with mock.patch.object(together, "ranks", return_value=1):
            wanted = score(model, documents, windows, n, batch_tokens=2 * n)
        assert found.context.equal(wanted.context) and found.document.equal(wanted.document)
        torch.testing.assert_close(found.nll, wanted.nll, rtol=0, atol=1e-5)
    assert read == [True] * 2 + [False] * 6


def run(ranks: int, folder: Path, port: int) -> None:
    """In processes that a server forks which has imported Lightning once."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    torch.multiprocessing.start_processes(main, (ranks, str(folder), port), ranks, start_method="forkserver")
