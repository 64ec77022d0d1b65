"""BERT base as FasterTransformer's tables have it: real tokens a second of encoding and of training, eager, compiled and ours.

    python -m benchmarks.fused --shapes 1x32 8x128 64x512

Every shape is measured with rows that are all full, and with rows that are full to three fifths in the mean. Hugging Face's model computes
the padding, attnzoo's does not. Encoding is checked as training is in benchmarks.bert: within twice the error of Hugging Face's model.
tests/test_fused_layer.py counts the kernels of a compiled layer, of which FasterTransformer wrote all but the matrix products by hand.
"""

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnzoo.hub import from_huggingface
from attnzoo.training.module import INPUTS
from benchmarks import harness
from benchmarks.accuracy import error_ratio
from benchmarks.bert import BACKENDS, DEVICE, TRAININGS, Case, Data, huggingface, keep, random_data, tokens_a_second
from benchmarks.harness import Backend, Pass, Session
from benchmarks.report import Row


def encoder(name: str) -> Backend:
    """The states of all tokens, with weights in bfloat16, without a head and without gradients: what FasterTransformer's encoder gives."""

    def make(case: Case, data: Data) -> Pass:
        ours, mode = TRAININGS[name]
        model = from_huggingface(huggingface(case)) if ours else huggingface(case)
        model = model.to(DEVICE, torch.bfloat16).eval()
        if ours:
            model.logits = lambda states: states

        def states(batch: dict) -> Tensor:
            if ours:
                return model(batch["input_ids"], **{key: batch[key] for key in INPUTS if key in batch and key != "logits_at"})
            return model.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state

        call = states if mode is None else torch.compile(states, mode=None if mode == "default" else mode, dynamic=False)

        @torch.no_grad()
        def encode(batch: dict) -> Tensor:
            return call(batch)

        turn = itertools.cycle([keep(data.batch(step, ours, DEVICE)) for step in range(4)])
        run = Pass(lambda: encode(next(turn)), lambda: (), [states_error(encode, ours, case, data)])
        for _ in range(4):
            run.forward()
        return run

    return Backend(name, make)


@torch.no_grad()
def states_error(encode: Callable[[dict], Tensor], ours: bool, case: Case, data: Data) -> Tensor:
    """The states of a batch's tokens as a share of the allowed error."""
    padded = data.batch(0, False, DEVICE)
    real = padded["attention_mask"]

    def of_tokens(dtype: torch.dtype) -> Tensor:
        theirs = huggingface(case).to(DEVICE, dtype).eval().bert
        return theirs(input_ids=padded["input_ids"], attention_mask=real).last_hidden_state[real]

    states = encode(keep(data.batch(0, ours, DEVICE)))
    return torch.tensor(error_ratio(states[: real.sum()] if ours else states[real], of_tokens(torch.bfloat16), of_tokens(torch.float32)))


def speed(session: Session) -> Iterator[list[Row]]:
    """Real tokens a second, encoding and training, of rows that are all full and of rows that are full to three fifths in the mean."""
    shapes = ["2x64"] if session.options.dry_run else session.options.shapes
    sizes = (500, 2, 128) if session.options.dry_run else (30522, session.options.layers, 768)
    for shape, padded in itertools.product(shapes, (False, True)):
        rows, seqlen = map(int, shape.split("x"))
        case = Case(rows, seqlen, seqlen // 5 if padded else seqlen, *sizes)
        data = random_data(case, 4)
        for direction, makers in (("encode", [encoder(b.name) for b in session.backends]), ("train", session.backends)):
            yield tokens_a_second(session, "speed", makers, case, data, direction)
            torch._dynamo.reset()


TABLES = {"speed": speed}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("fused", list(TABLES), list(BACKENDS))
    command.add_argument("--shapes", nargs="+", default=["1x32", "8x128", "64x512"], metavar="ROWSxLENGTH")
    command.add_argument("--layers", type=harness.positive, default=12, help="of a model (default: 12, BERT-base's); few compile sooner")
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-eager"], {}, arguments)


if __name__ == "__main__":
    sys.exit(main())
