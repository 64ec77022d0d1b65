"""Reads trained models of all kinds: run folders, checkpoints, folders of save_pretrained, weights from Hugging Face."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnzoo import checkpoint
from attnzoo.errors import UserError
from attnzoo.evaluation import runs

TASKS = {"GPT": "lm", "BERT": "mlm"}


@dataclass(frozen=True)
class Trained:
    """A trained model. where: the file, folder or name that was read. content: that of a checkpoint, with at least the keys `state_dict`
    and `attnzoo`; the record's tokenizer is None if the weights came without one."""

    where: str
    kind: str  # checkpoint | exported | huggingface
    content: dict[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        return self.content["attnzoo"]

    @property
    def weights(self) -> dict[str, Any]:
        """The model's state dict."""
        prefix = checkpoint.PREFIX
        return {name.removeprefix(prefix): value for name, value in self.content["state_dict"].items() if name.startswith(prefix)}


def read(given: str, *, key: str, prefer: str = "best") -> Trained:
    """The trained model that `given`, the value of the option `key`, names.

    It may be a checkpoint file; a run folder (`prefer`: best or last, if it has both); a folder that save_pretrained wrote, ours or one of
    GPT-2, BERT, FoX, Llama and models like it; or a name of such weights on the Hugging Face hub. Raises UserError for anything else, and
    for damaged files.
    """
    path = Path(given).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return _from_pretrained(str(path), key)
    if path.exists():
        (run, *others) = runs.find(str(path), None, prefer)
        if others:
            raise UserError(f"{key}={given} holds {1 + len(others)} runs; name one, such as {run.folder}")
        file = run.existing_checkpoint()
        return Trained(str(file), "checkpoint", checkpoint.read(file))
    if _may_be_on_the_hub(path, given):
        return _from_pretrained(given, key)
    raise UserError(f"{key}={given} does not exist; it must be a run folder, a checkpoint (*.ckpt), a folder that save_pretrained wrote, "
                    "or a model's name on the Hugging Face hub")


def _may_be_on_the_hub(path: Path, given: str) -> bool:
    """Whether `given` has the form name or owner/name, and there is no folder of the owner's name here."""
    if path.is_absolute() or given[:1] in ("~", ".") or path.suffix in (".ckpt", ".safetensors"):
        return False
    return len(path.parts) == 1 or (len(path.parts) == 2 and not path.parent.exists())


def _from_pretrained(source: str, key: str) -> Trained:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.utils import logging

    from attnzoo import hub
    from attnzoo.hub.configs import BERTConfig, ZooConfig

    logging.disable_progress_bar()

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the hub, the parser and the file system each raise their own kinds
        raise UserError(f"{key}={source} cannot be read as a model of transformers: {_first_line(error)}") from error
    try:
        if isinstance(config, ZooConfig):
            auto = AutoModelForMaskedLM if isinstance(config, BERTConfig) else AutoModelForCausalLM
            model, described, attention, kind = auto.from_pretrained(source).model, config.model, config.attention, "exported"
        else:
            model, kind = hub.from_huggingface(source), "huggingface"
            described, attention = hub.config_from_huggingface(config), hub.attention_from_huggingface(config)
    except Exception as error:
        raise UserError(f"{key}={source}: {_first_line(error)}") from error
    record = {
        "format": checkpoint.FORMAT, "model": described, "attention": attention, "tokenizer": _tokenizer(source),
        "task": TASKS[type(model).__name__], "context": described["train_context"],
    }
    return Trained(source, kind, {"attnzoo": record, "state_dict": {checkpoint.PREFIX + k: v for k, v in model.state_dict().items()}})


def _tokenizer(source: str) -> dict | None:
    """The record of the tokenizer that was saved with the weights; None if there is none."""
    from attnzoo.data import tokenizers
    from attnzoo.hub.configs import TOKENIZER_RECORD

    if (ours := Path(source) / TOKENIZER_RECORD).is_file():
        try:
            return json.loads(ours.read_text())
        except ValueError as error:
            raise UserError(f"{ours} cannot be read: {_first_line(error)}") from error
    try:
        return tokenizers.load(source).record()
    except ValueError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
