"""What is padding of what a model computes, by how sequences are put into steps (`data.batching`), and how fast it encodes them.

    python -m benchmarks.batching                                # counts tokens, and needs no GPU
    python -m benchmarks.batching time --sequences 512           # on one core of a CPU, or on a GPU

The lengths are those of TurboTransformers' requests, 5 to 500 tokens of equal probability, and a long tail as texts have it: lognormal with
a median of 100 tokens, cut at 512. A step has 64 rows at most, which are padded to a multiple of 64 tokens.

`time` encodes all steps with Hugging Face's BERT of 4 layers of 256, whose attention is PyTorch's with a padding mask, and packed steps
with attnzoo's model of the same weights, once the states of both were compared. Without a GPU it counts the processor's time on one thread,
so that other work beside it counts little.
"""

import argparse
import copy
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from attnzoo.data.masking import MaskedRows
from attnzoo.hub import from_huggingface
from attnzoo.training.module import INPUTS
from benchmarks import bert, machine
from benchmarks.accuracy import error_ratio

RESULTS = Path(__file__).parent / "results"
ROWS, SEQ_LEN = 64, 512
WAYS = {
    "random": {"batching": "random"},
    "by_length": {"batching": "by_length"},
    "scheduled, step_tokens=512": {"batching": "scheduled", "step_tokens": 512},
    "scheduled, step_tokens=4096": {"batching": "scheduled", "step_tokens": 4096},
    "scheduled, step_tokens=32768": {"batching": "scheduled", "step_tokens": 32768},
    "packed, balanced": {"batching": "balanced", "packed": True},
}
TOKENIZER = SimpleNamespace(vocab_size=100, pad_id=0, cls_id=None, sep_id=None, mask_id=1)


def lengths_of(kind: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return rng.integers(5, 500, n, endpoint=True)
    return rng.lognormal(np.log(100), 1.0, n).astype(int).clip(2, SEQ_LEN)


def batches(lengths: np.ndarray, options: dict) -> Iterator[dict]:
    """The steps of an epoch."""
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    store = SimpleNamespace(lengths=lengths + 1, offsets=offsets, tokens=np.full(offsets[-1], 2))
    rows = MaskedRows(store, SEQ_LEN, tokenizer=TOKENIZER, mask_rate=0.15, seed=0, shuffle=True, **{"packed": False, **options})
    order = rows.order(0, ROWS)
    return (rows.batch(0, order[i : i + ROWS]) for i in range(0, len(order), ROWS))


def count(lengths: np.ndarray, options: dict) -> tuple[int, int]:
    """Steps of an epoch, and the tokens that it computes with padding."""
    computed = [batch["input_ids"].numel() for batch in batches(lengths, options)]
    return len(computed), sum(computed)


@torch.inference_mode()
def rates(lengths: np.ndarray, rounds: int, case: bert.Case) -> dict[str, float]:
    """Real tokens a second by way, the median of rounds in which the ways take turns."""
    device = bert.DEVICE
    theirs = bert.huggingface(case).to(device).eval()
    ours = from_huggingface(theirs).to(device).eval()
    ours.logits = lambda states: states

    def seconds(steps: list[dict]) -> float:
        begin = clock(device)
        for batch in steps:
            if "attention_mask" in batch:
                theirs.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            else:
                ours(batch["input_ids"], **{key: batch[key] for key in INPUTS if key in batch and key != "logits_at"})
        return clock(device) - begin

    steps = {way: [{key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
                   for batch in batches(lengths, settings)] for way, settings in WAYS.items()}
    check(theirs, ours, steps["random"][0])
    for of_way in steps.values():
        seconds(of_way[:1])
    taken = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, of_way in steps.items():
            taken[way].append(seconds(of_way))
    return {way: int(lengths.sum()) / float(np.median(found)) for way, found in taken.items()}


def check(theirs: torch.nn.Module, ours: torch.nn.Module, padded: dict) -> None:
    """That both encode real tokens alike, to the rule of the field."""
    real, rows = padded["attention_mask"][:8].bool(), padded["input_ids"][:8]
    eager = theirs.bert(input_ids=rows, attention_mask=real).last_hidden_state[real]
    exact = copy.deepcopy(theirs).double().bert(input_ids=rows, attention_mask=real).last_hidden_state[real]
    if (share := error_ratio(ours(rows, attention_mask=real)[real], eager, exact)) > 1:
        raise RuntimeError(f"the packed model has {share:.2f} times the error that the rule allows")


def clock(device: str) -> float:
    """Seconds: of the processor on a CPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def timed(options: argparse.Namespace) -> None:
    case = bert.Case(seqlen=SEQ_LEN, vocab=TOKENIZER.vocab_size, layers=options.layers, dim=options.width)
    if bert.DEVICE == "cpu":
        torch.set_num_threads(1)
    table = []
    for kind in ("uniform", "lognormal"):
        found = rates(lengths_of(kind, options.sequences), options.rounds, case)
        table += [{"lengths": kind, "way": way, "sequences": options.sequences, "layers": case.layers, "width": case.dim,
                   "tokens_a_second": round(rate), "over_random": round(rate / found["random"], 3), **machine.describe(bert.DEVICE)}
                  for way, rate in found.items()]
    write(options.output / "batching-time.csv", table)
    draw(table, options.output / "batching-time.png")
    for row in table:
        print(f"{row['lengths']:>10} {row['way']:<30} {row['tokens_a_second']:>9} tokens/s, {row['over_random']:.2f} of random")


def draw(table: list[dict], path: Path) -> None:
    """A bar for each way, by kind of lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(row["lengths"] for row in table))
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(9, 2.8), sharex=True, sharey=True, layout="constrained")
    for panel, kind in zip(panels, kinds, strict=True):
        rows = [row for row in table if row["lengths"] == kind]
        bars = panel.barh([row["way"] for row in rows], [int(row["tokens_a_second"]) for row in rows])
        panel.bar_label(bars, [f"{float(row['over_random']):.2f} times" for row in rows], padding=3)
        panel.set(title=f"{kind} lengths", xlabel="real tokens a second")
        panel.margins(x=0.35)
    panels[0].invert_yaxis()  # `sharey` turns the other panels, too
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write(path: Path, table: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


def counted(options: argparse.Namespace) -> None:
    table = []
    for kind in ("uniform", "lognormal"):
        lengths = lengths_of(kind, options.sequences)
        for way, settings in WAYS.items():
            n_steps, computed = count(lengths, settings)
            table.append({"lengths": kind, "way": way, "sequences": len(lengths), "tokens": int(lengths.sum()), "steps": n_steps,
                          "computed": computed, "padding": round(1 - int(lengths.sum()) / computed, 4)})
    write(options.output / "batching.csv", table)
    for row in table:
        print(f"{row['lengths']:>10} {row['way']:<30} {row['steps']:>5} steps, {100 * row['padding']:5.1f} % padding")


def main(arguments: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(prog="python -m benchmarks.batching", description="Padding by how sequences are put into steps.")
    command.add_argument("table", nargs="?", choices=("count", "time"), default="count")
    command.add_argument("--sequences", type=int, default=20000)
    command.add_argument("--layers", type=int, default=4, help="of the model that is timed (default: 4)")
    command.add_argument("--width", type=int, default=256, help="likewise (default: 256)")
    command.add_argument("--rounds", type=int, default=3, help="of timing (default: 3)")
    command.add_argument("--output", type=Path, default=RESULTS, help="folder of batching.csv (default: benchmarks/results)")
    options = command.parse_args(arguments)
    {"count": counted, "time": timed}[options.table](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
