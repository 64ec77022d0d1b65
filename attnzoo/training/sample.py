"""The sample of text that the trained model writes."""

from pathlib import Path
from typing import Any

import lightning

from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder


class Sample(lightning.Callback):
    """At the end of training, writes the run folder's sample: the model continues, or fills in, the beginning of a validation document.

    prompt: a text to start from in place of the document. max_new_tokens, temperature: for generation.
    """

    def __init__(self, run_dir: str, prompt: str | None = None, max_new_tokens: int = 96, temperature: float = 0.8):
        self.path, self.prompt = RunFolder(Path(run_dir)).sample, prompt
        self.max_new_tokens, self.temperature = max_new_tokens, temperature

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if not trainer.is_global_zero or pl_module.is_sharded or trainer.fast_dev_run:
            return
        tokenizer, data = trainer.datamodule.tokenizer, trainer.datamodule
        if self.prompt is None:
            tokens = data.documents("validation")[0]["input_ids"][: pl_module.sample_length].tolist()
        else:
            tokens = tokenizer.encode(self.prompt)
        with trainer.precision_plugin.forward_context():
            text = pl_module.sample(tokenizer, tokens, self.max_new_tokens, self.temperature, pl_module.seed)
        write_whole(self.path, text)
