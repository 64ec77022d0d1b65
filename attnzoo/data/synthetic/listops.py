"""ListOps (Nangia & Bowman 2018, arXiv:1804.06028) with Long Range Arena's distribution (Tay et al. 2020, arXiv:2011.04006).

Nested operations on digits: minimum, maximum, median (rounded down) and sum modulo 10. The value of the whole expression, a digit, is the
class.

    MAX 4 3 MIN 2 3 X 1 0 MED 1 5 8 9 2 X X     is 5; X closes the innermost open operation
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

OPERATION_P = 0.25  # the probability that a node is an operation and not a digit
TOKENS = ("[PAD]", "[CLS]", "[EOS]", *map(str, range(10)), "MIN", "MAX", "MED", "SM", "X")
TRIES = 10**6  # expressions that are drawn before `example` gives up
DIGIT, OPERATION, CLOSE = TOKENS.index("0"), TOKENS.index("MIN"), TOKENS.index("X")
N_CLASSES = 10


def _median(values: list[int]) -> int:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


def _sum_modulo_10(values: list[int]) -> int:
    return sum(values) % 10


OPERATIONS: tuple[Callable[[list[int]], int], ...] = (min, max, _median, _sum_modulo_10)


def example(
    *, seed: int | Sequence[int], min_length: int = 500, max_length: int = 2000, max_depth: int = 10, max_args: int = 10
) -> tuple[np.ndarray, int]:
    """Token ids (uint8, indices into TOKENS) and value of a random expression of more than `min_length` and less than `max_length` tokens.

    A node is an operation with probability 1/4: one of the four, with 2 to `max_args` arguments. Otherwise, and always at depth
    `max_depth`, it is a digit. Whole expressions are drawn until the length fits.

    Raises:
        ValueError: no expression is that long, none of TRIES expressions fits, or an argument is out of its range.
    """
    check(min_length, max_length, max_depth, max_args)
    draws = _uniforms(np.random.default_rng(seed))
    for _ in range(TRIES):
        tokens, value = _expression(draws, max_length, max_depth, max_args)
        if min_length < len(tokens) < max_length:
            return np.array(tokens, np.uint8), value
    raise ValueError(f"min_length={min_length}, max_length={max_length}: none of {TRIES} expressions was between; widen them, or max_depth")


def _uniforms(rng: np.random.Generator) -> Iterator[float]:
    return itertools.chain.from_iterable(rng.random(1024).tolist() for _ in itertools.count())


def _expression(draws: Iterator[float], max_length: int, max_depth: int, max_args: int) -> tuple[list[int], int]:
    """Token ids and value of a random expression; ([], 0) as soon as it is certain to have more than `max_length` tokens."""
    tokens: list[int] = []
    opened: list[tuple[int, int, list[int]]] = []  # operation, number of its arguments, arguments so far
    while len(tokens) + len(opened) < max_length:
        if len(opened) < max_depth - 1 and next(draws) < OPERATION_P:
            operation = int(4 * next(draws))
            opened.append((operation, 2 + int((max_args - 1) * next(draws)), []))
            tokens.append(OPERATION + operation)
            continue
        value = int(10 * next(draws))
        tokens.append(DIGIT + value)
        while opened:
            operation, n_arguments, arguments = opened[-1]
            arguments.append(value)
            if len(arguments) < n_arguments:
                break
            opened.pop()
            tokens.append(CLOSE)
            value = OPERATIONS[operation](arguments)
        else:
            return tokens, value
    return [], 0


def check(min_length: int, max_length: int, max_depth: int, max_args: int) -> None:
    """Raises ValueError unless expressions of these sizes exist."""
    if max_depth < 1:
        raise ValueError(f"max_depth={max_depth} must be at least 1")
    if max_args < 2:
        raise ValueError(f"max_args={max_args} must be at least 2")
    if not 0 <= min_length <= max_length - 2:
        raise ValueError(f"min_length={min_length} must lie between 0 and max_length - 2 = {max_length - 2}: lengths lie strictly between")
    longest = ((max_args + 1) * max_args ** (max_depth - 1) - 2) // (max_args - 1)  # a full tree: 2 tokens per operation, 1 per digit
    if longest <= min_length:
        raise ValueError(f"min_length={min_length} must be below {longest}, the longest with max_depth={max_depth}, max_args={max_args}")
