"""attnzoo's GPT and BERT behind transformers' Auto classes: `from_pretrained` and `save_pretrained`, without trust_remote_code."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from attnzoo import checkpoint, trained
from attnzoo.hub.configs import BERTConfig, GPTConfig
from attnzoo.hub.pretrained import BERTForMaskedLM, GPTForCausalLM
from attnzoo.hub.tokenizers import to_transformers


def register() -> None:
    """Registers both model types with transformers' Auto classes. `import attnzoo.hub` does it."""
    for auto, config, model in ((AutoModelForCausalLM, GPTConfig, GPTForCausalLM), (AutoModelForMaskedLM, BERTConfig, BERTForMaskedLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.register(config, model, exist_ok=True)


def from_checkpoint(path: str | Path, *, trust: tuple[str, ...] = ()) -> Any:
    """A checkpoint, or the best one of a run folder, as a GPTForCausalLM or BERTForMaskedLM. Its save_pretrained also writes the tokenizer.

    Raises attnzoo.errors.UserError for a file that is not a checkpoint, and ValueError for a model of another kind.
    """
    read = trained.read(str(path), key="path")
    loaded = checkpoint.rebuild(read.content, read.where, trust=trust)
    classes = {"GPT": (GPTConfig, GPTForCausalLM), "BERT": (BERTConfig, BERTForMaskedLM)}
    kind = type(loaded.model).__name__
    if kind not in classes:
        raise ValueError(f"{path}: must hold one of {', '.join(classes)}, got {kind}")
    config, model = classes[kind]
    tokens = {f"{role}_token_id": getattr(loaded.tokenizer, f"{role}_id") for role in ("eos", "pad")}
    result = model(config(model=loaded.record["model"], attention=loaded.record["attention"], **tokens))
    result.model.load_state_dict(loaded.model.state_dict())
    result.tokenizer, result.tokenizer_record = to_transformers(loaded.tokenizer, context=loaded.context), loaded.record["tokenizer"]
    return result.eval()
