"""What `python -m attnzoo.show` does: a picture of what a layer sees, found by asking the layer itself with values of its own choice."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from pydantic import Field
from torch import Tensor

from attnzoo import checkpoint, models, trained
from attnzoo.attention.base import Attention, SequenceInfo
from attnzoo.attention.supports import check_path
from attnzoo.errors import UserError
from attnzoo.evaluation.heatmaps import COLOUR_MAP
from attnzoo.run import checks
from attnzoo.run.config import plain
from attnzoo.run.files import write_whole
from attnzoo.signatures import Natural, check_value

LONGEST = 1024  # tokens: a picture needs a number for each pair of them, and has no more pixels
LABELLED = 64  # tokens of a text that are written beside the weights
PER_ROW = 4
FORMATS = (".png", ".svg", ".pdf")
KEYS = {"what": Literal["mask", "distances", "weights"] | None, "layer": Natural, "head": Natural | None, "text": str | None, "output": str,
        "length": Annotated[int, Field(ge=2, le=LONGEST)], "checkpoint": Literal["best", "last"], "trust": list[str]}
UNITS = {"mask": "weight at equal scores", "distances": "distance seen (tokens)", "weights": "weight"}


def show(cfg: DictConfig, overrides: Sequence[str] = ()) -> str:
    """Draws what configs/show.yaml describes; returns what was drawn and where it lies. UserError or ValueError for what cannot be drawn.

    overrides: the command's, which say what of attention, layers and model a checkpoint is read with.
    """
    for key, hint in KEYS.items():
        check_value(key, cfg[key], hint)
    if Path(cfg.output).suffix not in FORMATS:
        raise UserError(f"output={cfg.output} must end in {' or '.join(FORMATS)}")
    if (cfg.text is None) != (cfg.ckpt_path is None) or (cfg.what == "weights" and cfg.text is None):
        raise UserError(f"ckpt_path={cfg.ckpt_path}, text={cfg.text}: a checkpoint's weights need both, every other picture neither")
    if cfg.text is not None and cfg.what not in (None, "weights"):
        raise UserError(f"what={cfg.what} must be weights where ckpt_path is set")
    labels = None
    if cfg.ckpt_path is not None:
        what, (layer, found, labels) = "weights", _of_checkpoint(cfg, overrides)
    else:
        checks.check_training(cfg)
        model = {key: value for key, value in plain(cfg.model).items() if key != "attention"}
        layer = _layer(models.from_config(model | {"vocab_size": 1}, plain(cfg.attention), trust=tuple(cfg.trust)), cfg.layer)
        what = cfg.what or ("distances" if layer.extends_context else "mask")
        found = distances(layer, cfg.length) if what == "distances" else mask(layer, cfg.length)
    seen = 100 * (~found.isnan() if what == "distances" else found != 0).double().mean()
    title = f"attention={layer.name}, layer {cfg.layer}"
    figure = _figure({name: found[head] for name, head in _heads(found, cfg.head).items()}, title, what, labels)
    output = Path(cfg.output)
    write_whole(output, lambda file: figure.savefig(file, format=output.suffix[1:], dpi=100))
    hint = "" if seen else "; the layer reads zeros, so a variant whose weight is 0 at a score of 0 shows nothing"
    return f"{output}: {what} of {title}, {found.shape[-1]} tokens, {seen:.1f} % of all pairs of a query and a key are seen{hint}"


def mask(layer: Attention, length: int) -> Tensor:
    """What each query would take of each key if all scores were equal, of its largest: (heads, length, length), 0 for what is not seen."""
    found = _weights(layer, lambda: _read_nothing(layer, length)).abs()
    return found / found.amax(-1, keepdim=True).clamp(min=torch.finfo(found.dtype).tiny)


def distances(layer: Attention, length: int) -> Tensor:
    """How many tokens lie between query and key as the scores of a layer with rotary positions see it: (heads, length, length).

    Positive for earlier keys, NaN for keys that are not seen. It is read from the fastest pair of channels that stays below half a circle.
    """
    if layer.rope is None:
        raise UserError(f"what=distances: needs model.positions=rotary, got {layer.spec.positions}")
    rope, project = layer.rope, layer.project
    turns = [rope.base ** (-2 * pair / rope.dim) for pair in range(rope.dim // 2)]
    pair = next((i for i, turn in enumerate(turns[: int(rope.proportion * len(turns))]) if turn * length < 3), None)
    if pair is None:
        raise UserError(f"length={length}: must be at most {int(3 / turns[-1])}, within which the slowest rotation is below half a circle")

    def log_weights(size: float, channel: int) -> Tensor:
        """With queries of this size along the pair's first channel and keys along `channel`, relative to each query's own key."""

        def probed(x: Tensor) -> tuple[Tensor, ...]:
            q, k, *rest = project(x)
            if k.shape[-1] != q.shape[-1]:
                raise UserError(f"attention={layer.name}, what=distances: needs keys that are projected as wide as queries, got "
                                f"{k.shape[-1]} and {q.shape[-1]} channels; what=mask has no such need")
            unit = torch.eye(q.shape[-1], dtype=q.dtype)
            return size * unit[pair].expand(q.shape), unit[channel].expand(k.shape), *rest

        layer.project = probed
        try:
            found = _weights(layer, lambda: _read_nothing(layer, length)).abs().log()
        finally:
            del layer.project
        return found - found.diagonal(dim1=1, dim2=2)[..., None]

    # a score is proportional to the cosine or the sine of the distance times the turn; what does not depend on it is taken away
    even, cosine, sine = log_weights(0, pair), log_weights(1, pair), log_weights(1, pair + rope.dim // 2)
    fallen, sine = even - cosine, sine - even
    angle = 2 * torch.atan2(fallen * sine.sign(), sine.abs())
    factor = ((fallen**2 + sine**2) / (2 * fallen)).where(angle.abs() > 0.3, torch.nan)  # in a softmax that of the query
    if even.diagonal(dim1=1, dim2=2).isnan().any() or (factor.nan_to_num(0).amax(-1) > 1.01 * factor.nan_to_num(torch.inf).amin(-1)).any():
        raise UserError(f"attention={layer.name}, what=distances: needs a softmax over scores of rotated products in which each token sees "
                        "itself; what=mask has no such need")
    return (angle / turns[pair]).where(even.isfinite(), torch.nan)


def _read_nothing(layer: Attention, length: int) -> None:
    dtype = torch.float32 if getattr(layer, "impl", None) in ("triton", "gluon", "cpu") else torch.float64
    layer.to(dtype).eval()
    layer(torch.zeros(1, length, layer.spec.dim, dtype=dtype), SequenceInfo(torch.arange(length)[None]))


@torch.no_grad()
def _weights(layer: Attention, run: Callable[[], Any]) -> Tensor:
    """What each query takes of each key's value in run(), which calls the layer once: (heads, queries, keys).

    The layer attends to the columns of the identity in place of its values. ValueError where its output is not weights times values.
    """
    attend, found = layer.attend, []

    def probed(q: Tensor, k: Tensor, v: Tensor, seq: SequenceInfo, *rest: Tensor) -> Tensor:
        length, kv_heads, width = v.shape[1:]
        columns = F.pad(torch.eye(length, dtype=v.dtype), (0, -length % width)).split(width, dim=1)
        outs = [attend(q, k, part[None, :, None].expand(1, -1, kv_heads, -1), seq, *rest) for part in columns]
        weights = torch.cat(outs, -1)[0, ..., :length].transpose(0, 1)
        values = torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(0))
        by_head = values[0].repeat_interleave(max(len(weights) // kv_heads, 1), dim=1).transpose(0, 1)
        if len(weights) % kv_heads or not torch.allclose(
            (weights @ by_head).transpose(0, 1), attend(q, k, values, seq, *rest)[0], rtol=1e-3, atol=1e-3
        ):
            if layer.drawn_with:
                raise UserError(f"attention={layer.name}: can be drawn only with {layer.drawn_with}; otherwise its output is not weights "
                                "times values")
            raise ValueError(f"attention={layer.name}: attend must give weights times values, got something else; what a layer does to "
                             "that product belongs in finish")
        found.append(weights)
        return attend(q, k, v, seq, *rest)

    layer.attend = probed
    try:
        run()
    finally:
        del layer.attend
    return found[0]


def _layer(model: torch.nn.Module, index: int) -> Attention:
    if index >= len(model.blocks):
        raise UserError(f"layer={index}: must be below the model's {len(model.blocks)} layers")
    layer = model.blocks[index].attention
    check_path(getattr(layer, "impl", None), torch.device("cpu"))
    return layer


def _of_checkpoint(cfg: DictConfig, overrides: Sequence[str]) -> tuple[Attention, Tensor, list[str]]:
    """The layer, its weights on the text, and the text's tokens."""
    chosen = [override.lstrip("+~").partition("=")[0].split(".") for override in overrides]
    if ["model"] in chosen:
        raise UserError("model, ckpt_path: a checkpoint brings its own model; leave out model, or override keys: model.rope_scaling=ntk")
    composed, groups = plain(cfg), {key[0] for key in chosen}
    attention = composed["attention"] if "attention" in groups else {}
    changed = {key[1] for key in chosen if key[0] == "model"} | groups & {"layers"}
    model = {key: composed["model"][key] for key in changed}
    given = trained.read(cfg.ckpt_path, key="ckpt_path", prefer=cfg.checkpoint)
    if given.record["tokenizer"] is None:
        raise UserError(f"ckpt_path={given.where} has no tokenizer beside its weights; save one there (tokenizer.json)")
    loaded = checkpoint.rebuild(given.content, given.where, attention=attention, model=model, trust=tuple(cfg.trust))
    layer = _layer(loaded.model, cfg.layer)
    ids = loaded.tokenizer.encode(cfg.text)
    if not 0 < len(ids) <= LONGEST:
        raise UserError(f"text: must have 1 to {LONGEST} tokens, got {len(ids)}")
    found = _weights(layer, lambda: loaded.model(torch.tensor([ids])))
    return layer, found, [loaded.tokenizer.decode([i]) for i in ids]


def _heads(found: Tensor, head: int | None) -> dict[str, int]:
    """The heads to draw by what their panels are called; heads that are alike are one."""
    if head is not None:
        if head >= len(found):
            raise UserError(f"head={head}: must be below the layer's {len(found)} heads")
        return {f"head {head}": head}
    alike: list[list[int]] = []
    for i, one in enumerate(found):
        like = next((group for group in alike if torch.allclose(one, found[group[0]], equal_nan=True)), None)
        alike.append([i]) if like is None else like.append(i)
    return {"all heads" if len(alike) == 1 else f"head {', '.join(map(str, group))}": group[0] for group in alike}


def _figure(panels: Mapping[str, Tensor], title: str, what: str, labels: Sequence[str] | None):
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    n_columns = min(len(panels), PER_ROW)
    n_rows = -(-len(panels) // n_columns)
    values = torch.stack(list(panels.values())).float()
    signed = what != "mask" and bool((values < 0).any())
    largest = values.nan_to_num(0).abs().max().item() or 1.0
    scale = {"vmin": -largest, "vmax": largest} if signed else {"norm": PowerNorm(0.5 if what == "weights" else 1.0, 0, largest)}
    size = 4.2 if n_columns == 1 else 3.0
    figure = Figure(figsize=(n_columns * size + 0.8, n_rows * size + 0.4), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    for panel, name, matrix in zip(axes, panels, values, strict=False):
        drawn = matrix.where(matrix != 0, torch.nan) if what != "distances" else matrix
        image = panel.imshow(drawn.numpy(), cmap="PuOr" if signed else f"{COLOUR_MAP}_r", interpolation="nearest", **scale)
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=7)
        if labels is not None and len(labels) <= LABELLED:
            shown = [repr(label)[1:-1].replace(" ", "␣").replace("$", r"\$") for label in labels]
            panel.set_xticks(range(len(shown)), shown, fontsize=5, rotation=90)
            panel.set_yticks(range(len(shown)), shown, fontsize=5)
    for panel in list(axes)[len(panels) :]:
        panel.set_axis_off()
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.suptitle(title, fontsize=10)
    if what != "mask" or ((values > 0) & (values < 1)).any():
        figure.colorbar(image, ax=figure.axes, shrink=0.7).set_label(UNITS[what], fontsize=9)
    return figure
