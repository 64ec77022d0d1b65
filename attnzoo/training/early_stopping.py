"""Early stopping that a resume does not change."""

from typing import Any

import lightning
from lightning.pytorch.callbacks import EarlyStopping as Lightnings


class EarlyStopping(Lightnings):
    """Lightning's, for runs that may be resumed. The patience is that of the command, and a run that it has ended stays so until the
    patience is raised."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})

    def on_fit_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.wait_count >= max(1, self.patience):
            trainer.should_stop = True
