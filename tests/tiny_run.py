"""Training runs of a second, for the tests of training, resuming and checkpoints."""

import csv
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from attnzoo import checkpoint
from attnzoo.models import from_config

ROOT = Path(__file__).parent.parent
TINY = [
    "data=text",
    "data.seq_len=32",
    "data.batch_size=4",
    "data.val_fraction=0.2",
    "model.dim=32",
    "model.n_layers=2",
    "model.n_heads=2",
    "trainer=cpu",
    "trainer.precision=32",
    "trainer.max_steps=12",
    "trainer.val_check_interval=6",
    "trainer.log_every_n_steps=1",
    "optimizer.warmup_steps=2",
    "callbacks.progress=null",
]


def compose_tiny(folder: Path, *overrides: str, config: str = "train", plot: bool = False):
    """The config of a run in folder/run on a small text in folder. plot: with loss.png, which takes a fifth of such a run."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir(parents=True)
        for document in range(2, 18):  # of unlike lengths, so that batches have unlike numbers of targets
            text = "".join(f"{document} times {n} is {document * n}.\n" for n in range(3 * document))
            (corpus / f"{document}.txt").write_text(text)
    standard = [*TINY, f"data.paths=[{corpus}]", f"data.cache_dir={folder / 'cache'}"] if config == "train" else []
    standard += [] if plot or config != "train" else ["callbacks.plot=null"]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose(config, overrides=[*standard, f"run_dir={folder / 'run'}", *overrides])


def column(folder: Path, name: str) -> list[str]:
    """A metric's values over the steps, as written in metrics.csv."""
    with open(folder / "run" / "metrics.csv", newline="") as file:
        return [row[name] for row in csv.DictReader(file) if row[name]]


FLASH = {"_target_": "attnzoo.attention.flash.FlashAttention", "_partial_": True}
RANDOM = {"vocab_size": 259, "dim": 16, "n_layers": 2, "n_heads": 2, "mlp": "swiglu", "norm": "rmsnorm", "bias": False}


def write_checkpoint(path: Path, kind: str = "GPT", task: str = "lm", context: int = 32, attention: dict = FLASH,
                     tokenizer: dict | None = None, **options) -> torch.nn.Module:
    """Writes a checkpoint of a random model, which it returns. options: of the model, over RANDOM."""
    model = {"_target_": f"attnzoo.models.{kind}", **RANDOM, "train_context": context, **options}
    torch.manual_seed(0)
    built = from_config(model, attention)
    record = {"format": checkpoint.FORMAT, "model": model, "attention": attention, "tokenizer": tokenizer or {"kind": "bytes"},
              "task": task, "context": context, "data": {}, "versions": {}}
    checkpoint.save({"state_dict": {f"model.{k}": v for k, v in built.state_dict().items()}, "attnzoo": record, "global_step": 7}, path)
    return built.eval()
