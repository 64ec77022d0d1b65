"""Hugging Face weights: imports GPT-2, BERT, FoX, Llama and similar models, and exports GPT-2 and BERT. The logits stay equal."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.attention.base import Attention, AttentionSpec
from attnzoo.hub import deepseek, fox
from attnzoo.hub.configs import require
from attnzoo.models import BERT, GPT, from_config
from attnzoo.models.transformer import Transformer

_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_BY_TOKEN = ("token_embedding.weight", "head.weight", "head_bias")


class _Weight(NamedTuple):
    """A tensor of the transformers model (`theirs`) and the parameters of ours that it holds, one after another.

    transposed: whether it is stored as in GPT-2's Conv1D. rows: indices that bring its rows into our order, None if the order is the same.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    rows: Tensor | None = None


def from_huggingface(source: str | Path | nn.Module, *, attention: Callable[[AttentionSpec], Attention] | None = None) -> GPT | BERT:
    """A GPT or BERT in float32 with the weights of a transformers model, in training mode with the config's dropout.

    The model is a GPT2LMHeadModel, a BertForMaskedLM, the ForCausalLM of Llama, Mistral, Ministral3, Qwen3, Phi3, SmolLM3, or of DeepseekV2
    or V3 without experts, or a published Forgetting Transformer.

    source: a folder, a name on the hub, or the transformers model itself. attention: the variant's class, or any callable as in `GPT`; None
    takes the attention that `attention_from_huggingface` describes. Parameters that only the variant has keep their initial values. Layers
    with a sliding window need a variant that takes window_size. No code of the checkpoint's author runs.

    Raises ValueError for a missing or incomplete checkpoint, for options that attnzoo's models do not have, and for an attention that lacks
    a parameter of the weights, or has it in another shape.
    """
    theirs = source if isinstance(source, nn.Module) else _load(str(source))
    arguments = config_from_huggingface(theirs.config)
    expected = _huggingface_class(theirs.config.model_type)
    if not isinstance(theirs, expected):
        raise ValueError(f"source: must be a {expected.__name__}, got {type(theirs).__name__}; load it as {expected.__name__}")
    if attention is None:
        model = from_config(arguments, attention_from_huggingface(theirs.config))
    else:
        model = _MODELS[theirs.config.model_type](attention=attention, **{k: v for k, v in arguments.items() if k != "_target_"})
    parameters = dict(model.named_parameters())
    state = theirs.state_dict()
    weights = list(_weights(model, theirs.config.model_type, theirs.config))
    if lacking := [name for weight in weights for name in weight.ours if name not in parameters]:
        raise ValueError(f"attention: must have the weights' parameter {lacking[0]}; leave it out for what they were trained with")
    with torch.no_grad():
        for weight in weights:
            parts = [_used_rows(name, parameters[name], model.vocab_size) for name in weight.ours]
            tensor = state[weight.theirs].T if weight.transposed else state[weight.theirs]
            tensor = tensor if weight.rows is None else tensor[weight.rows]
            if tensor.shape != (sum(map(len, parts)), *parts[0].shape[1:]):
                raise ValueError(f"attention: {', '.join(weight.ours)} must have the weights' shape {tuple(tensor.shape)} together, got "
                                 f"{[tuple(part.shape) for part in parts]}; leave it out for what they were trained with")
            for part, piece in zip(parts, tensor.split([part.shape[0] for part in parts]), strict=True):
                part.copy_(piece)
    return model


def save_huggingface(model: GPT | BERT, path: str | Path, **config: Any) -> None:
    """Writes `config.json` and safetensors that GPT2LMHeadModel or BertForMaskedLM reads with `from_pretrained`.

    config: entries to add, such as the tokenizer's eos_token_id, bos_token_id and pad_token_id, which are None otherwise.
    Raises ValueError for a model that their architecture cannot express, such as one with rotary positions or a window.
    """
    model_type = "gpt2" if isinstance(model, GPT) else "bert"
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    expected = _huggingface_class(model_type)
    parameters = dict(model.named_parameters())
    state = {}
    described = expected.config_class(**tokens | _config_for_huggingface(model) | config)
    for weight in _weights(model, model_type):
        tensor = torch.cat([_used_rows(name, parameters[name].detach(), model.vocab_size) for name in weight.ours])
        state[weight.theirs] = (tensor.T if weight.transposed else tensor).contiguous()
    with torch.device("meta"):
        theirs = expected(described)
    theirs.load_state_dict(state, assign=True)
    theirs.tie_weights()
    theirs.save_pretrained(path)


def config_from_huggingface(config: Any) -> dict[str, Any]:
    """The plain description (`_target_` and arguments, as for `attnzoo.models.from_config`) of a transformers config of these models."""
    describe = {"gpt2": _from_gpt2, "bert": _from_bert, **dict.fromkeys(_LLAMAS, _from_llama),
                **dict.fromkeys(deepseek.CLASSES, _from_deepseek), fox.FoXConfig.model_type: fox.describe}
    if config.model_type not in describe:
        raise ValueError(f"model_type={config.model_type!r}: must be one of {', '.join(describe)}, the architectures that attnzoo has")
    return describe[config.model_type](config)


def attention_from_huggingface(config: Any) -> dict[str, Any]:
    """The plain description (`_target_` and arguments) of the attention that weights with this transformers config were trained with."""
    if config.model_type == fox.FoXConfig.model_type:
        return fox.describe_attention(config)
    if config.model_type in deepseek.CLASSES:
        return deepseek.describe_attention(config)
    return {"_target_": "attnzoo.attention.flash.FlashAttention", "_partial_": True}


def _from_gpt2(config: Any) -> dict[str, Any]:
    require(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False,
             embd_pdrop=config.resid_pdrop)
    return {
        "_target_": "attnzoo.models.GPT", "vocab_size": config.vocab_size, "dim": config.n_embd, "n_layers": config.n_layer,
        "n_heads": config.n_head, "mlp": _gelu(config.activation_function), "mlp_dim": config.n_inner,
        "norm_eps": config.layer_norm_epsilon, "norm_position": "pre", "max_positions": config.n_positions,
        "train_context": config.n_positions, "dropout": config.resid_pdrop, "attention_dropout": config.attn_pdrop,
        **_shared(config),
    }


def _from_bert(config: Any) -> dict[str, Any]:
    require(config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    return {
        "_target_": "attnzoo.models.BERT", "vocab_size": config.vocab_size, "type_vocab_size": config.type_vocab_size,
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "mlp": _gelu(config.hidden_act), "mlp_dim": config.intermediate_size, "norm_eps": config.layer_norm_eps, "norm_position": "post",
        "max_positions": config.max_position_embeddings, "train_context": config.max_position_embeddings,
        "dropout": config.hidden_dropout_prob, "attention_dropout": config.attention_probs_dropout_prob, **_shared(config),
    }


def _from_llama(config: Any) -> dict[str, Any]:
    """The description of Llama and of models that differ from it by a norm of queries and keys (Qwen3), partly rotated heads (Phi-3),
    windows in all or some layers (Mistral, Qwen3, Phi-3), layers without rotation (SmolLM3), or Llama 4's temperature (Ministral 3)."""
    require(config, hidden_act="silu", attention_bias=False, mlp_bias=False, embd_pdrop=getattr(config, "resid_pdrop", 0.0))
    return {
        "_target_": "attnzoo.models.GPT", "vocab_size": config.vocab_size, "dim": config.hidden_size, "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads, "head_dim": getattr(config, "head_dim", None),
        "mlp": "swiglu", "mlp_dim": config.intermediate_size, "norm": "rmsnorm", "norm_eps": config.rms_norm_eps, "norm_position": "pre",
        "positions": "rotary", **_rope(config), "qk_norm": config.model_type == "qwen3", "bias": False,
        "train_context": config.max_position_embeddings, "tie_embeddings": config.tie_word_embeddings, "pad_vocab_multiple": 64,
        "dropout": getattr(config, "resid_pdrop", 0.0), "attention_dropout": config.attention_dropout, "layers": _layers(config),
    }


def _from_deepseek(config: Any) -> dict[str, Any]:
    deepseek.check(config)
    return _from_llama(config) | {"head_dim": config.qk_nope_head_dim}


def _layers(config: Any) -> dict[str, Any] | None:
    """The pattern of layers with a sliding window or without rotation; None if there are no such layers."""
    n_layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or n_layers * ["sliding_attention"]
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{config.model_type} config layer_types: {', '.join(sorted(unknown))} not supported, must be full_attention or "
                         "sliding_attention")
    if window is None or window >= config.max_position_embeddings or not getattr(config, "use_sliding_window", True):
        types = n_layers * ["full_attention"]
    rotated = getattr(config, "no_rope_layers", None) or n_layers * [1]
    kinds = {
        "full": {}, "full_nope": {"positions": "none"},
        "local": {"attention": {"window_size": [(window or 0) - 1, 0]}},  # the window of transformers includes the query's own key
    }
    kinds["local_nope"] = kinds["local"] | kinds["full_nope"]
    pattern = [("local" if kind == "sliding_attention" else "full") + ("" if turned else "_nope")
               for kind, turned in zip(types[:n_layers], rotated[:n_layers], strict=True)]
    if set(pattern) == {"full"}:
        return None
    period = next(n for n in range(1, n_layers + 1) if all(kind == pattern[i % n] for i, kind in enumerate(pattern)))
    return {"pattern": pattern[:period], **{kind: kinds[kind] for kind in dict.fromkeys(pattern)}}


def _rope(config: Any) -> dict[str, Any]:
    """The model's options for rotation, and its attention temperature, that follow from the config's rope_parameters."""
    given = dict(config.rope_parameters)
    scaling, base, factor = given.pop("rope_type"), given.pop("rope_theta"), given.pop("factor", None)
    partial, origin = given.pop("partial_rotary_factor", 1.0), given.pop("original_max_position_embeddings", None)
    beta = given.pop("llama_4_scaling_beta", None)
    given.pop("max_position_embeddings", None)  # the config itself has it, too
    given.pop("type", None)  # rope_type's older name
    named = {"rope_base": base, "partial_rotary_factor": partial}
    if beta is not None and config.model_type == "ministral3":  # the others of transformers do not read it
        named["attention_temperature"] = {"name": "llama4", "floor_scale": origin, "attn_scale": beta, "first": 0}
    if scaling == "default":
        return named
    if scaling == "proportional":  # p-RoPE
        named["rope_proportion"] = named.pop("partial_rotary_factor")
        return named if factor in (None, 1) else named | {"rope_scaling": "linear", "rope_factor": factor}
    if scaling == "dynamic":
        origin = config.max_position_embeddings
    if factor is None:
        factor = config.max_position_embeddings / origin
    options = {name: value for name, value in given.items() if value is not None}
    return named | {"rope_scaling": scaling, "rope_factor": factor, "original_context": origin, "rope_options": options or None}


def _shared(config: Any) -> dict[str, Any]:
    return {"norm": "layernorm", "positions": "learned", "bias": True, "tie_embeddings": config.tie_word_embeddings,
            "pad_vocab_multiple": 64}


def _gelu(name: str) -> str:
    if name not in _GELUS:
        raise ValueError(f"activation {name!r}: not supported, must be one of {', '.join(_GELUS)}")
    return _GELUS[name]


def _config_for_huggingface(model: GPT | BERT) -> dict[str, Any]:
    """The arguments of GPT2Config or BertConfig. Raises ValueError for a model that these cannot describe."""
    block = model.blocks[0]
    spec, norm = block.attention.spec, block.attention_norm
    gpt = isinstance(model, GPT)
    specs = [block.attention.spec for block in model.blocks]
    needs = {
        "attention=flash or sdpa without window, softcap and sinks": all(b.attention.plain for b in model.blocks),
        "model.qk_norm=false": not any(spec.qk_norm for spec in specs),
        "model.attention_gate=none": all(spec.gate == "none" for spec in specs),
        "model.attention_temperature=none": all(b.attention.temperature is None for b in model.blocks),
        "model.positions=learned": spec.positions == "learned",
        "model.norm=layernorm": isinstance(norm, nn.LayerNorm),
        f"model.norm_position={'pre' if gpt else 'post'}": block.pre_norm == gpt,
        "model.mlp=gelu or gelu_tanh": block.mlp.kind != "swiglu",
        "model.bias=true": spec.bias,
        "n_kv_heads = n_heads and head_dim = dim / n_heads": spec.n_kv_heads == spec.n_heads and spec.head_dim * spec.n_heads == spec.dim,
        "model.type_vocab_size of at least 1": gpt or model.type_embedding is not None,
    }
    missing = [need for need, met in needs.items() if not met]
    if missing:
        raise ValueError(f"Hugging Face's {'GPT-2' if gpt else 'BERT'} cannot hold this model; it needs {'; '.join(missing)}")
    activation = {"gelu": "gelu", "gelu_tanh": "gelu_new"}[block.mlp.kind]
    positions, mlp_dim, dropout = model.position_embedding.num_embeddings, block.mlp.up_proj.out_features, block.dropout.p
    common = {"vocab_size": model.vocab_size, "tie_word_embeddings": model.head is None}
    if gpt:
        return common | {
            "n_embd": spec.dim, "n_layer": spec.n_layers, "n_head": spec.n_heads, "n_inner": mlp_dim, "n_positions": positions,
            "activation_function": activation, "layer_norm_epsilon": norm.eps, "embd_pdrop": dropout, "resid_pdrop": dropout,
            "attn_pdrop": spec.dropout,
        }
    return common | {
        "hidden_size": spec.dim, "num_hidden_layers": spec.n_layers, "num_attention_heads": spec.n_heads, "intermediate_size": mlp_dim,
        "max_position_embeddings": positions, "type_vocab_size": model.type_embedding.num_embeddings, "hidden_act": activation,
        "layer_norm_eps": norm.eps, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": spec.dropout,
    }


_LLAMAS = {"llama": "Llama", "qwen3": "Qwen3", "phi3": "Phi3", "smollm3": "SmolLM3", "mistral": "Mistral", "ministral3": "Ministral3"}
_MODELS = {"gpt2": GPT, "bert": BERT, **dict.fromkeys((*_LLAMAS, *deepseek.CLASSES, fox.FoXConfig.model_type), GPT)}


def _huggingface_class(model_type: str) -> type:
    import transformers

    if name := (_LLAMAS | deepseek.CLASSES).get(model_type):
        return getattr(transformers, f"{name}ForCausalLM")
    return {"gpt2": transformers.GPT2LMHeadModel, "bert": transformers.BertForMaskedLM,
            fox.FoXConfig.model_type: fox.FoXForCausalLM}[model_type]


def _load(source: str) -> nn.Module:
    from transformers import AutoConfig

    def refused(error: Exception) -> ValueError:
        reason = str(error).strip().partition("\n")[0]
        return ValueError(f"source={source!r}: must be a folder with config.json and weights, or a name on the hub ({reason})")

    # transformers and safetensors raise a dozen kinds of errors for missing, foreign and broken files
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise refused(error) from error
    config_from_huggingface(config)
    try:
        model, report = _huggingface_class(config.model_type).from_pretrained(source, output_loading_info=True)
    except Exception as error:
        raise refused(error) from error
    if report["missing_keys"]:
        raise ValueError(f"source={source!r}: lacks the weights {sorted(report['missing_keys'])}; "
                         f"it must be saved from a {type(model).__name__}")
    return model


def _used_rows(name: str, tensor: Tensor, vocab_size: int) -> Tensor:
    """A view of the parameter without the rows that pad the vocabulary."""
    return tensor[:vocab_size] if name in _BY_TOKEN else tensor


def _weights(model: Transformer, model_type: str, config: Any = None) -> Iterator[_Weight]:
    """Which tensor of theirs holds which parameters of ours. config: the transformers config, needed for import only."""
    if model_type == fox.FoXConfig.model_type:
        yield from (_Weight(theirs, ours) for theirs, (ours, _) in fox.parameters(config).items())
        return
    head = "token_embedding.weight" if model.head is None else "head.weight"
    blocks = range(len(model.blocks))
    if model_type in _LLAMAS | deepseek.CLASSES:
        fused = model_type == "phi3"
        yield _Weight("model.embed_tokens.weight", ("token_embedding.weight",))
        yield _Weight("model.norm.weight", ("final_norm.weight",))
        yield _Weight("lm_head.weight", (head,))
        for i in blocks:
            if model_type in deepseek.CLASSES:
                names = _LLAMA_BLOCK | _MLP_APART
                for theirs, (ours, rows) in deepseek.matrices(config).items():
                    parts = tuple(f"blocks.{i}.attention.{name}.weight" for name in ours)
                    yield _Weight(f"model.layers.{i}.self_attn.{theirs}.weight", parts, rows=rows)
            else:
                names = _LLAMA_BLOCK | (_PHI3_FUSED if fused else _LLAMA_APART) | (_QWEN3_NORMS if model_type == "qwen3" else {})
            for theirs, ours in names.items():
                yield _Weight(f"model.layers.{i}.{theirs}.weight", tuple(f"blocks.{i}.{name}.weight" for name in ours))
        return
    if isinstance(model, GPT):
        yield _Weight("transformer.wte.weight", ("token_embedding.weight",))
        yield _Weight("transformer.wpe.weight", ("position_embedding.weight",))
        yield _Weight("lm_head.weight", (head,))
        yield from _both("transformer.ln_f", "final_norm")
        for i in blocks:
            for theirs, ours in _GPT2_BLOCK.items():
                yield from _both(f"transformer.h.{i}.{theirs}", *(f"blocks.{i}.{name}" for name in ours), transposed="ln" not in theirs)
        return
    for theirs, ours in _BERT_EMBEDDINGS.items():
        yield _Weight(f"bert.embeddings.{theirs}_embeddings.weight", (f"{ours}_embedding.weight",))
    yield _Weight("cls.predictions.decoder.weight", (head,))
    yield _Weight("cls.predictions.bias", ("head_bias",))
    yield _Weight("cls.predictions.decoder.bias", ("head_bias",))
    yield from _both("bert.embeddings.LayerNorm", "embedding_norm")
    yield from _both("cls.predictions.transform.dense", "head_dense")
    yield from _both("cls.predictions.transform.LayerNorm", "head_norm")
    for i in blocks:
        for theirs, ours in _BERT_BLOCK.items():
            yield from _both(f"bert.encoder.layer.{i}.{theirs}", f"blocks.{i}.{ours}")


_GPT2_BLOCK = {
    "ln_1": ("attention_norm",),
    "attn.c_attn": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.c_proj": ("attention.o_proj",),
    "ln_2": ("mlp_norm",),
    "mlp.c_fc": ("mlp.up_proj",),
    "mlp.c_proj": ("mlp.down_proj",),
}
_LLAMA_BLOCK = {
    "input_layernorm": ("attention_norm",),
    "self_attn.o_proj": ("attention.o_proj",),
    "post_attention_layernorm": ("mlp_norm",),
    "mlp.down_proj": ("mlp.down_proj",),
}
_MLP_APART = {f"mlp.{x}_proj": (f"mlp.{x}_proj",) for x in ("gate", "up")}
_LLAMA_APART = {f"self_attn.{x}_proj": (f"attention.{x}_proj",) for x in "qkv"} | _MLP_APART
_PHI3_FUSED = {
    "self_attn.qkv_proj": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_QWEN3_NORMS = {f"self_attn.{x}_norm": (f"attention.{x}_norm",) for x in "qk"}
_BERT_EMBEDDINGS = {"word": "token", "position": "position", "token_type": "type"}
_BERT_BLOCK = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "mlp_norm",
}


def _both(theirs: str, *ours: str, transposed: bool = False) -> Iterator[_Weight]:
    """The weight and the bias of a module."""
    yield _Weight(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), transposed)
    yield _Weight(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours))
