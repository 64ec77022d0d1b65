"""The configs of attnzoo's GPT and BERT for transformers: the plain descriptions of model and attention that a checkpoint holds.

`attnzoo.models.from_config` builds the model from them. No code of a config's author runs.
"""

from typing import Any

from transformers import PreTrainedConfig

TOKENIZER_RECORD = "attnzoo_tokenizer.json"  # beside transformers' files: the record of attnzoo.data.tokenizers


class ZooConfig(PreTrainedConfig):
    """model, attention: `_target_` and arguments, as in configs/model and configs/attention."""

    model: dict | None = None
    attention: dict | None = None

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @property
    def hidden_size(self) -> int:
        return self.model["dim"]

    @property
    def num_hidden_layers(self) -> int:
        return self.model["n_layers"]

    @property
    def num_attention_heads(self) -> int:
        return self.model["n_heads"]


class GPTConfig(ZooConfig):
    model_type = "attnzoo_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]


class BERTConfig(ZooConfig):
    model_type = "attnzoo_bert"


def require(config: Any, **expected: Any) -> None:
    """Raises ValueError if a transformers config has another value for one of these attributes; attributes that it lacks are accepted."""
    for name, value in expected.items():
        found = getattr(config, name, value)
        if found != value:
            raise ValueError(f"{config.model_type} config {name}={found!r}: not supported, must be {value!r}")
