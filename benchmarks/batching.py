"""What is padding of what a model computes, by how sequences are put into steps (`data.batching`). It counts tokens, and needs no GPU.

    python -m benchmarks.batching

The lengths are those of TurboTransformers' requests, 5 to 500 tokens of equal probability, and a long tail as texts have it: lognormal with
a median of 100 tokens, cut at 512. A step has 64 rows at most, which are padded to a multiple of 64 tokens.
"""

import argparse
import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from attnzoo.data.masking import MaskedRows

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


def count(lengths: np.ndarray, options: dict) -> tuple[int, int]:
    """Steps of an epoch, and the tokens that it computes with padding."""
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    store = SimpleNamespace(lengths=lengths + 1, offsets=offsets, tokens=np.zeros(offsets[-1], np.int64))
    rows = MaskedRows(store, SEQ_LEN, tokenizer=TOKENIZER, mask_rate=0.15, seed=0, shuffle=True, **{"packed": False, **options})
    order = rows.order(0, ROWS)
    steps = [order[i : i + ROWS] for i in range(0, len(order), ROWS)]
    return len(steps), sum(rows.batch(0, step)["input_ids"].numel() for step in steps)


def main(arguments: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(prog="python -m benchmarks.batching", description="Padding by how sequences are put into steps.")
    command.add_argument("--sequences", type=int, default=20000)
    command.add_argument("--output", type=Path, default=RESULTS, help="folder of batching.csv (default: benchmarks/results)")
    options = command.parse_args(arguments)
    table = []
    for kind in ("uniform", "lognormal"):
        lengths = lengths_of(kind, options.sequences)
        for way, settings in WAYS.items():
            n_steps, computed = count(lengths, settings)
            table.append({"lengths": kind, "way": way, "sequences": len(lengths), "tokens": int(lengths.sum()), "steps": n_steps,
                          "computed": computed, "padding": round(1 - int(lengths.sum()) / computed, 4)})
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "batching.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    for row in table:
        print(f"{row['lengths']:>10} {row['way']:<30} {row['steps']:>5} steps, {100 * row['padding']:5.1f} % padding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
