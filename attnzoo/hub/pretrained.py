"""attnzoo's models as subclasses of transformers' PreTrainedModel, which `attnzoo.hub.auto` registers."""

import json
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from attnzoo.attention.base import KVCache
from attnzoo.hub.configs import TOKENIZER_RECORD, BERTConfig, GPTConfig
from attnzoo.models import from_config

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"  # its name before 5.24


class LayerCaches:
    """The KV caches of all layers, with the interface that transformers' generation needs. Their room at least doubles when it runs out."""

    is_compileable = False

    def __init__(self, layers: list[KVCache]):
        self.layers = layers

    @property
    def is_linear(self) -> list[bool]:
        """For each layer whether it holds a state in place of keys; none does."""
        return [False] * len(self.layers)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.layers[layer].length

    def make_room(self, tokens: int) -> None:
        for layer, cache in enumerate(self.layers):
            if cache.length + tokens > cache.max_len:
                self.layers[layer] = larger = KVCache(cache.batch, max(2 * cache.max_len, cache.length + tokens))
                larger.append(*cache.read())

    def reorder_cache(self, beams: Tensor) -> None:
        """Replaces the content of each row b by that of row beams[b]."""
        for cache in self.layers:
            cache.take(beams)


class _Pretrained(PreTrainedModel):
    base_model_prefix = "model"
    tokenizer: Any = None  # a transformers tokenizer; only a model that was made from a checkpoint has one
    tokenizer_record: dict | None = None  # the record of our own tokenizer

    def save_pretrained(self, save_directory: str | os.PathLike, **options: Any) -> None:
        """Saves as transformers does, and also saves the tokenizer and its record if the model has one."""
        super().save_pretrained(save_directory, **options)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)
            (Path(save_directory) / TOKENIZER_RECORD).write_text(json.dumps(self.tokenizer_record))

    def __init__(self, config: GPTConfig | BERTConfig):
        if not config.model or not config.attention:
            raise ValueError(f"config: a {config.model_type} needs `model` and `attention`, each with `_target_` and arguments, got "
                             f"model={config.model}, attention={config.attention}")
        super().__init__(config)
        self.model = from_config(config.model, config.attention)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Sets buffers that no file holds to NaN: from_pretrained makes them on the meta device. The model initialises itself."""
        for name in module._non_persistent_buffers_set:
            nn.init.constant_(getattr(module, name), math.nan)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.token_embedding

    def read(self, input_ids: Tensor, attention_mask: Tensor | None, **options: Any) -> Tensor:
        if attention_mask is not None and bool(attention_mask.all()):
            attention_mask = None  # no padding to remove
        return self.model(input_ids, attention_mask=attention_mask, **{k: v for k, v in options.items() if v is not None})


class GPTForCausalLM(_Pretrained, GenerationMixin):
    """attnzoo.models.GPT with transformers' calling convention: labels are the input_ids, and the loss shifts them."""

    config_class = GPTConfig

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                labels: Tensor | None = None, past_key_values: LayerCaches | None = None, cache: LayerCaches | None = None,
                use_cache: bool | None = None, **kwargs: Any) -> CausalLMOutputWithPast:
        """With a cache no row may be padded. Padded rows need use_cache=False, and are then read from their first token again at each step.
        past_key_values and cache are two names for the same argument."""
        batch, seqlen = input_ids.shape
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = LayerCaches(self.model.new_cache(batch, seqlen + 64))
        if cache is not None:
            if attention_mask is not None and not attention_mask.all():
                raise ValueError("attention_mask: padded rows have no cache here; set use_cache=False, or generate from rows of one length")
            attention_mask = None
            cache.make_room(seqlen)
        logits = self.read(input_ids, attention_mask, position_ids=position_ids, cache=cache and cache.layers)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool | None = None,
                                      **kwargs: Any) -> dict[str, Any]:
        if (cache := kwargs.get(CACHE)) is not None:
            input_ids = input_ids[:, cache.get_seq_length() :]
        return {"input_ids": input_ids, CACHE: cache, "attention_mask": attention_mask, "use_cache": use_cache}


class BuiltGPT(GPTForCausalLM):
    """GPTForCausalLM around an existing GPT, which is not built from the config."""

    def __init__(self, model: nn.Module, config: GPTConfig):
        PreTrainedModel.__init__(self, config)
        self.model = model


class BERTForMaskedLM(_Pretrained):
    """attnzoo.models.BERT with transformers' calling convention: labels are -100 for tokens that are not targets."""

    config_class = BERTConfig

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
                position_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> MaskedLMOutput:
        if self.model.type_embedding is None:  # tokenizers return them even for models without token types
            token_type_ids = None
        logits = self.read(input_ids, attention_mask, token_type_ids=token_type_ids, position_ids=position_ids)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits)
