"""What `python generate.py` does: a trained model goes on with a text, token by token, on the screen."""

import contextlib
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from attnzoo import checkpoint, trained
from attnzoo.attention.supports import check_path
from attnzoo.errors import UserError
from attnzoo.models.decoding import read_once
from attnzoo.run import values


def generate(cfg: DictConfig) -> None:
    """Writes what configs/generate.yaml describes to standard output. UserError or ValueError for what cannot be done."""
    values.check_generation(cfg)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a test's
            stream.reconfigure(errors="backslashreplace")  # a locale of ASCII loses nothing
    prompt = _prompt(cfg)
    writer = Writer(cfg)
    if prompt is not None:
        if cfg.num_samples == 1:
            show(prompt)
        try:
            writer.go_on(prompt)
        except (ValueError, UserError):
            print(flush=True)  # the error gets a line of its own
            raise
    while cfg.interactive and (prompt := _ask()) is not None:
        try:
            writer.go_on(prompt)
        except (ValueError, UserError) as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print()


class Writer:
    """A model with its tokenizer on a device, and how it draws."""

    def __init__(self, cfg: DictConfig):
        given = trained.read(cfg.ckpt_path, key="ckpt_path", prefer=cfg.checkpoint)
        if given.record["tokenizer"] is None:
            raise UserError(f"ckpt_path={given.where} has no tokenizer beside its weights; save one there (tokenizer.json)")
        attention, model = (OmegaConf.to_container(cfg[group], resolve=True) if cfg.get(group) else {} for group in ("attention", "model"))
        loaded = checkpoint.rebuild(given.content, given.where, attention=attention, trust=tuple(cfg.trust),
                                    model={key: value for key, value in model.items() if value is not None})
        if not hasattr(loaded.model, "stream"):
            kind = type(loaded.model).__name__
            raise UserError(f"ckpt_path={given.where} holds a {kind}, trained for task={loaded.task}: it reads whole texts and writes "
                            "none; take a GPT, which python train.py model=gpt_tiny trains")
        self.cfg, self.tokenizer, self.context, self.description = cfg, loaded.tokenizer, loaded.context, loaded.record["model"]
        self.fabric, self.model = _place(loaded.model, cfg)
        for block in loaded.model.blocks:
            check_path(getattr(block.attention, "impl", None), self.device)
        self.generator = torch.Generator(self.device).manual_seed(cfg.seed)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def go_on(self, prompt: str) -> None:
        """Shows how the model goes on with the prompt: token by token, or texts that are whole; of several each with the prompt."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # of bytes that are not UTF-8 Python makes halves of surrogate pairs
            raise ValueError(f"prompt: must be UTF-8, got {prompt!r}") from error
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ValueError("prompt: must have at least one token")
        if self.cfg.beams > 1:
            texts = self._beams(ids)
        elif self.cfg.num_samples > 1:
            texts = list(zip(*self._tokens(ids), strict=True))
        else:
            texts = [(token for (token,) in self._tokens(ids))]
        for number, tokens in enumerate(texts, 1):
            if len(texts) > 1:
                show(f"[{number} of {len(texts)}]\n{prompt}")
            for piece in self._text(tokens, after=ids):
                show(piece)
            print(flush=True)

    def _text(self, tokens: Iterable[int], after: list[int]) -> Iterator[str]:
        """Up to the end of the text. after: the prompt's tokens."""
        return self.tokenizer.decode_stream(takewhile(lambda token: token != self.tokenizer.eos_id, tokens), after)

    def _tokens(self, prompt: list[int]) -> Iterator[list[int]]:
        """The next token of each text, until all have ended."""
        cfg, end = self.cfg, self.tokenizer.eos_id
        options = {"temperature": cfg.temperature, "top_k": cfg.top_k, "top_p": cfg.top_p, "generator": self.generator, "graph": cfg.graph,
                   "samples": cfg.num_samples, "stop": [] if end is None else [end]}
        with self.fabric.autocast():
            for drawn in self.model.stream(torch.tensor([prompt], device=self.device), cfg.max_new_tokens, **options):
                yield drawn.flatten().tolist()

    def _beams(self, prompt: list[int]) -> list[list[int]]:
        """The new tokens of the likeliest texts, by transformers' beam search."""
        from transformers import LogitsProcessorList

        from attnzoo.hub.configs import GPTConfig
        from attnzoo.hub.pretrained import CACHE, BuiltGPT, LayerCaches

        self.model._check_length(len(prompt) + self.cfg.max_new_tokens - 1)
        end, ids = self.tokenizer.eos_id, torch.tensor([prompt], device=self.device)
        model = BuiltGPT(self.model, GPTConfig(model=self.description, attention={}))
        with self.fabric.autocast(), torch.no_grad():
            cache = {}
            if self.model.reads_in_parts and len(prompt) > 1:  # else transformers reads the prompt for each beam
                read = read_once(self.model, ids[0, :-1], self.cfg.beams, len(prompt) + self.cfg.max_new_tokens)
                cache[CACHE] = LayerCaches(read)
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.cfg.max_new_tokens, do_sample=False, num_beams=self.cfg.beams,
                num_return_sequences=self.cfg.num_samples, use_cache=self.model.supports.cache, eos_token_id=end, pad_token_id=end,
                logits_processor=LogitsProcessorList([_numbers]), **cache)
        return found[:, len(prompt) :].tolist()


def _numbers(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A transformers' logits processor that changes nothing."""
    if scores.isnan().any():
        raise ValueError("the model's logits are NaN, from which no text can be searched")
    return scores


def _prompt(cfg: DictConfig) -> str | None:
    if cfg.prompt_file is None:
        return None if cfg.prompt is None else str(cfg.prompt)
    try:
        return Path(cfg.prompt_file).expanduser().read_bytes().decode()  # not read_text, which rewrites line ends
    except (OSError, ValueError) as error:
        raise UserError(f"prompt_file={cfg.prompt_file} cannot be read: {error}") from error


def _place(model: torch.nn.Module, cfg: DictConfig) -> tuple[Any, torch.nn.Module]:
    from lightning.fabric import Fabric

    try:
        fabric = Fabric(accelerator=cfg.accelerator, devices=1, precision=cfg.precision or "32")
        if cfg.precision is None and fabric.device.type == "cuda":
            fabric = Fabric(accelerator=cfg.accelerator, devices=1, precision="bf16-mixed")
    except (ValueError, RuntimeError) as error:
        raise UserError(f"accelerator={cfg.accelerator}, precision={cfg.precision}: {' '.join(str(error).split())}") from error
    return fabric, fabric.setup_module(model).eval().module


def _ask() -> str | None:
    """A line of the user's; None at the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if line:
            return line


def show(text: str) -> None:
    """Prints a piece of text at once; on a terminal without what would steer it."""
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def harmless(text: str) -> str:
    """Control characters but for newlines and tabs as their escapes: a model may write what moves a cursor or sets a title."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else repr(c)[1:-1] for c in text)
