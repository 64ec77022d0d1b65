"""attnzoo's GPT and BERT behind transformers' Auto classes: `from_pretrained` and `save_pretrained`, without trust_remote_code."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from attnzoo import checkpoint
from attnzoo.hub.configs import BERTConfig, GPTConfig
from attnzoo.hub.pretrained import BERTForMaskedLM, GPTForCausalLM


def register() -> None:
    """Tell transformers' Auto classes of both model types. `import attnzoo.hub` does it."""
    for auto, config, model in ((AutoModelForCausalLM, GPTConfig, GPTForCausalLM), (AutoModelForMaskedLM, BERTConfig, BERTForMaskedLM)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.register(config, model, exist_ok=True)


def from_checkpoint(path: str | Path, *, trust: tuple[str, ...] = ()) -> Any:
    """A training run's checkpoint as a GPTForCausalLM or BERTForMaskedLM, ready for save_pretrained; without its tokenizer.

    Raises attnzoo.errors.UserError for a file that is none, and ValueError for a model of another kind.
    """
    loaded = checkpoint.load(path, trust=trust)
    classes = {"GPT": (GPTConfig, GPTForCausalLM), "BERT": (BERTConfig, BERTForMaskedLM)}
    kind = type(loaded.model).__name__
    if kind not in classes:
        raise ValueError(f"{path}: must hold one of {', '.join(classes)}, got {kind}")
    config, model = classes[kind]
    result = model(config(model=loaded.record["model"], attention=loaded.record["attention"]))
    result.model.load_state_dict(loaded.model.state_dict())
    return result.eval()
