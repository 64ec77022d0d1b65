"""Which sequences share a step (`data.batching`), and the one shape of steps that hold sequences of all lengths."""

import math

import numpy as np

from attnzoo.data.scheduling import batch_sizes

BATCHINGS = ("random", "by_length", "scheduled", "balanced")
SLOTS, LOGITS = 128, 64  # static shapes are multiples of these, so that they are divisible by the tiles of matrix products


def check_batching(batching: str, *, packed: bool, shuffle: bool) -> None:
    """ValueError if `data.batching` has no such value, or does not go with `data.packed` and `data.shuffle`."""
    if batching not in BATCHINGS:
        raise ValueError(f"data.batching={batching!r} must be one of {', '.join(BATCHINGS)}")
    if batching == "balanced" and not (packed and shuffle):
        raise ValueError("data.batching=balanced must go with data.packed=true and data.shuffle=true")
    if batching == "scheduled" and (packed or not shuffle):
        raise ValueError("data.batching=scheduled must go with data.packed=false and data.shuffle=true: packed rows have no padding")


class StepOrder:
    """The order in which the epochs of a loader take rows (see `attnzoo.data.loader`).

    Args:
        lengths: int64 (n_rows,), the tokens of each row.
        seed: the seed of shuffling.
        shuffle: whether epochs are shuffled. If not, `batching` does nothing.
        longest: rows are padded to a multiple of 64 tokens, at most to this.
        batching: which rows share a step, one of BATCHINGS. "random": any. "by_length": those of similar length, so that padded rows hold
            less padding. "scheduled": those of similar length; `attnzoo.data.scheduling` begins a new step where that costs less than
            padding, so that steps may have fewer rows. "balanced": those of all lengths, so that packed steps hold nearly the same number
            of tokens.
        step_tokens: "scheduled" only: the fixed cost of a step, expressed as a number of tokens.
    """

    def __init__(self, lengths: np.ndarray, *, seed: int, shuffle: bool, longest: int, batching: str = "random", step_tokens: int = 4096):
        self.lengths, self.n_rows = lengths, len(lengths)
        self.seed, self.shuffle, self.longest, self.batching, self.step_tokens = seed, shuffle, longest, batching, step_tokens
        self._schedules: dict[int, np.ndarray] = {}

    def order(self, epoch: int, group: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.n_rows)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(self.n_rows)
        if self.batching == "balanced":
            return self._balanced(order, group, rng)
        if self.batching == "scheduled":
            return self._scheduled(order, group, rng)
        if self.batching == "random":
            return order
        # sort by length inside windows of 50 steps, then shuffle the steps; an incomplete last step stays last
        order = order[np.lexsort((self.lengths[order], np.arange(self.n_rows) // (50 * group)))]
        whole = self.n_rows // group * group
        return np.concatenate([rng.permutation(order[:whole].reshape(-1, group)).reshape(-1), order[whole:]])

    def n_slots(self, group: int) -> int:
        """The number of places in an epoch's order: one for each row, and with a schedule also the empty places of its steps."""
        scheduled = self.batching == "scheduled" and self.shuffle
        return len(self._schedule(group)) * group if scheduled else self.n_rows

    def _balanced(self, order: np.ndarray, group: int, rng: np.random.Generator) -> np.ndarray:
        """An order in which every step has one row of every length class.

        If the last step is incomplete, it lacks those classes that the first step begins with: loaders fill it with the first rows.
        """
        order = order[np.argsort(self.lengths[order], kind="stable")]
        whole, rest = divmod(self.n_rows, group)
        spread = spread_out(group)
        sizes = np.full(group, whole)
        sizes[spread[group - rest :]] += 1
        classes = [rng.permutation(rows) for rows in np.split(order, np.cumsum(sizes)[:-1])]
        steps = np.stack([classes[c][:whole] for c in spread], axis=1)
        return np.concatenate([steps.reshape(-1), *(classes[c][whole:] for c in spread[group - rest :])])

    def _schedule(self, group: int) -> np.ndarray:
        """The number of rows in each step, where the rows are sorted by length."""
        if group not in self._schedules:
            lengths = padded(np.sort(self.lengths), self.longest)
            self._schedules[group] = batch_sizes(lengths, group, lambda rows, longest: self.step_tokens + rows * longest)
        return self._schedules[group]

    def _scheduled(self, order: np.ndarray, group: int, rng: np.random.Generator) -> np.ndarray:
        """The schedule's steps in random order. Rows of equal length are in random order too. Empty places hold `n_rows`."""
        sizes = self._schedule(group)
        steps = np.full((len(sizes), group), self.n_rows)
        # every device takes neighbouring places of a step; the rows are spread out, so that each device gets its share
        steps[spread_out(group) < sizes[:, None]] = order[np.argsort(self.lengths[order], kind="stable")]
        return rng.permutation(steps).reshape(-1)


class StaticShape:
    """Numbers of tokens and of masked tokens that nearly always suffice for a step with one row of each length class.

    They lie five standard deviations above the mean. Packed steps are filled up to them, so that nothing is compiled or captured again.

    Args:
        lengths: int64 (n_rows,), the tokens of each row.
        maskable: int64 (n_rows,), those that may be masked, and the rate at which they are; at least one of each row is.
    """

    def __init__(self, lengths: np.ndarray, maskable: np.ndarray | None = None, mask_rate: float = 0.0):
        self.lengths, self.maskable, self.mask_rate = lengths, maskable, mask_rate
        self._usual: dict[int, tuple[int, int]] = {}

    def slots(self, n_rows: int, n_tokens: int) -> int:
        """The slots of a step of `n_rows` rows which has so many tokens. At least the last one is padding."""
        return max(self._sizes(n_rows)[0], round_up(n_tokens + 1, SLOTS))

    def logits(self, n_rows: int, n_targets: int) -> int:
        """The logits of a step of `n_rows` rows which has so many masked tokens."""
        return max(self._sizes(n_rows)[1], round_up(n_targets, LOGITS))

    def _sizes(self, n_rows: int) -> tuple[int, int]:
        if n_rows not in self._usual:
            n_tokens, deviation = _total(self.lengths, n_rows)
            n_slots, n_logits = n_tokens + 5 * deviation + 1, 0.0
            if self.maskable is not None:
                rate = self.mask_rate
                n_maskable, deviation = _total(self.maskable, n_rows)
                n_targets = rate * n_maskable + n_rows * ((1 - rate) ** self.maskable).mean()
                n_logits = n_targets + 5 * math.sqrt(rate * (1 - rate) * n_maskable + (rate * deviation) ** 2)
            self._usual[n_rows] = round_up(n_slots, SLOTS), round_up(n_logits, LOGITS)
        return self._usual[n_rows]


def _total(lengths: np.ndarray, n_rows: int) -> tuple[float, float]:
    """Mean and standard deviation of the sum of `n_rows` lengths, one of each length class."""
    classes = [c for c in np.array_split(np.sort(lengths), n_rows) if len(c)]
    return n_rows * lengths.mean(), math.sqrt(sum(c.var() for c in classes))


def spread_out(n: int) -> np.ndarray:
    """The numbers 0 .. n - 1 in an order in which each half, each quarter and so on covers the whole range, as far as n can be halved.

    These are the parts that 2, 4, ... devices take.
    """
    if n % 2:
        return np.arange(n)
    half = 2 * spread_out(n // 2)
    return np.concatenate([half, half + 1])


def padded(lengths: np.ndarray, longest: int) -> np.ndarray:
    """The lengths to which rows of these lengths are padded: multiples of 64, at most `longest`."""
    return np.minimum(-(-lengths // 64) * 64, longest)


def pad_rows(values: np.ndarray, real: np.ndarray, fill: int) -> np.ndarray:
    """Values of concatenated rows as a matrix, int64 as `real`, which is true where it has a value and false where it has `fill`."""
    rows = np.full(real.shape, fill, np.int64)
    rows[real] = values
    return rows


def fill_up(values: np.ndarray, n: int, fill: int) -> np.ndarray:
    """`values` and so many `fill` behind them that there are `n`."""
    return np.pad(values, (0, n - len(values)), constant_values=fill)


def round_up(n: float, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple
