"""The progress bar of a comparison."""

import logging
import time

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from attnzoo.evaluation import together

log = logging.getLogger(__name__)


class Progress:
    """One bar in tokens over all measurements of all runs. A run that is not planned yet is estimated as the mean of those before it.
    Without a terminal, progress is logged every `seconds`."""

    def __init__(self, n_readings: int, seconds: float = 15.0):
        self.waiting, self.planned, self.done = n_readings, [], 0  # readings not planned yet, tokens of each planned one, tokens read
        self.seconds, self.said = seconds, time.monotonic()
        self.bar = tqdm(total=0, unit="tok", unit_scale=True, smoothing=0.05, disable=None if together.is_first() else True)
        self.redirect = logging_redirect_tqdm()

    def __enter__(self):
        self.redirect.__enter__()
        return self

    def __exit__(self, *error):
        self.redirect.__exit__(*error)
        self.bar.close()

    def begin_reading(self, title: str) -> None:
        self.waiting -= 1
        self.bar.set_description_str(title)

    def plan(self, tokens: int) -> None:
        self.planned.append(tokens)
        self.bar.total = sum(self.planned) + self.waiting * sum(self.planned) // len(self.planned)
        self.bar.refresh()

    def begin(self, title: str) -> None:
        self.bar.set_description_str(title)

    def advance(self, tokens: int) -> None:
        self.done += tokens
        self.bar.update(tokens)
        if self.bar.disable and self.bar.total and time.monotonic() > self.said + self.seconds:
            self.said = time.monotonic()
            log.info(f"{self.bar.desc}: {min(self.done / self.bar.total, 1):.0%} of all {tqdm.format_sizeof(self.bar.total)} tokens read")

    def end_reading(self) -> None:
        self.advance(max(0, sum(self.planned) - self.done))  # what a failed run did not read
