"""`tree_attention` over prompts with several answers: against FlexAttention with the tree's mask, and every path as a packed sequence.

    python -m benchmarks.tree

A rate counts visible pairs, each shared token once; the packed sequences, which repeat the prompt, have more pairs and tokens, so that
their milliseconds tell what sharing saves. The tree's ranges and FlexAttention's block mask are made outside of the timing, and inside of
it in those columns that say so. Compiling what makes FlexAttention's block mask takes minutes: `--backends` names `flex with its lists`.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from attnzoo_kernels import flash_attention, tree_attention
from attnzoo_kernels.flash import cases as flash_cases
from attnzoo_kernels.tree import tree_ranges
from attnzoo_kernels.tree.cases import Case, Inputs, rollouts
from benchmarks import flash, harness
from benchmarks.harness import Entry, Line, Pass, Session, differentiable
from benchmarks.ranges import WITH, backends
from benchmarks.report import Row

PATHS = "paths "
ANSWERS = 8


def attnzoo(impl: str, lists: bool = False) -> Callable[[Case, Inputs], Pass]:
    """lists: the ranges and their tables are made in every call."""

    def make(case: Case, x: Inputs) -> Pass:
        if lists or impl == "reference":
            attend = functools.partial(tree_attention, impl=impl, deterministic=False, **x.options)
        else:
            attend = functools.partial(flash_attention, impl=impl, deterministic=False, ranges=tree_ranges(**x.options))
        return differentiable(attend, (x.q, x.k, x.v), x.dout)

    return make


def mask_of(case: Case, x: Inputs) -> Callable[..., Tensor]:
    """FlexAttention's mask_mod: a token is seen from itself on to the end of what lies below its segment."""
    _, below, begin, end, _ = tree_ranges(**x.options).ranges.T
    below = below.repeat_interleave((end - begin).long())

    def mask(b, h, i, j):
        return (j <= i) & (i < below[j])

    return mask


BACKENDS = backends(attnzoo, mask_of, PATHS)
BACKENDS["flex" + WITH] = replace(BACKENDS["flex" + WITH], on_request=True)


def speed(session: Session) -> Iterator[list[Row]]:
    """Forward and backward by number of tokens: a prompt of a third of them, and eight answers."""
    o = session.options
    for head_dim, total in itertools.product(o.head_dims, o.lengths):
        heads = o.hidden // head_dim
        shape = {"heads": heads, "kv_heads": heads // o.group, "head_dim": head_dim, "dtype": session.dtype}
        prompt, answer = total // 3, total // (3 * ANSWERS // 2)
        tree = rollouts(prompt, answer, ANSWERS, **shape)
        paths = flash_cases.Case(lengths_q=(prompt + answer,) * ANSWERS, causal=True, **shape)
        columns = []
        for case, operator, of_paths in ((tree, tree_attention, False), (paths, flash_attention, True)):
            x = case.inputs(session.device)
            work = {"forward": case.flops(), "backward": case.flops(backward=True)}
            check = flash.Check(case, x, o.directions, operator)
            columns += [Entry(b.name, b, case, x, work, check) for b in session.backends if b.name.startswith(PATHS) == of_paths]
        line = Line("tree", "speed", f"d{head_dim}, {ANSWERS} answers", total)
        yield from harness.compare_late_ones_last(line, columns, o.directions, session.timing)


TABLES = {f.__name__: f for f in (speed,)}


def main(arguments: list[str] | None = None) -> int:
    command = harness.parser("tree", list(TABLES), list(BACKENDS))
    command.add_argument("--lengths", nargs="+", type=harness.positive, default=[6144, 12288], help="tokens of a tree")
    command.add_argument("--head-dims", nargs="+", type=harness.positive, default=[64, 128])
    command.add_argument("--hidden", type=harness.positive, default=2048, help="heads * head_dim (default: 2048)")
    command.add_argument("--group", type=harness.positive, default=4, help="query heads of a key head (default: 4); the check of more than "
                         "16384 tokens has memory for 1 only")
    if "--dry-run" in (sys.argv[1:] if arguments is None else arguments):
        command.set_defaults(lengths=[60], head_dims=[16], hidden=64)
    return harness.main(command, TABLES, BACKENDS, ["attnzoo-reference", PATHS + "attnzoo-reference"], {"speed": "tokens"}, arguments)


if __name__ == "__main__":
    sys.exit(main())
