"""FoX's options and the Pro form: the published weights by their names, shifts within sequences, caches, export, and what is refused."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_run import write_checkpoint
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from attnzoo import checkpoint, trained
from attnzoo.attention import AttentionSpec
from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.forgetting import ForgettingAttention
from attnzoo.data.tokenizers import ByteTokenizer
from attnzoo.hub import from_checkpoint, from_huggingface
from attnzoo.hub.tokenizers import to_transformers
from attnzoo.models import from_config

transformers = pytest.importorskip("transformers")

TARGET = "attnzoo.attention.forgetting.ForgettingAttention"
OPTIONS = {"shift_keys": True, "shift_values": True, "output_norm": True}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "train_context": 16, "bias": False, "positions": "none",
         "qk_norm": True, "attention_gate": "elementwise", "norm": "rmsnorm"}
LENGTHS = [7, 1, 0, 12]
# as in the published config.json, but for the sizes, and an eps that shows where it stands
PUBLISHED = {
    "architectures": ["ForgettingTransformerForCausalLM"], "attention_bias": False, "bos_token_id": None, "decay_time_max": None,
    "decay_time_min": None, "elementwise_affine": True, "eos_token_id": None, "fgate_bias_init": False, "fgate_type": "full",
    "fuse_cross_entropy": True, "fuse_norm": True, "hidden_act": "swish", "hidden_ratio": 3.5, "hidden_size": 32,
    "initializer_range": 0.02, "intermediate_size": None, "max_position_embeddings": None,
    "model_type": "forgetting_transformer-project_fox", "norm_eps": 0.01, "num_heads": 4, "num_hidden_layers": 2, "num_kv_heads": None,
    "ogate_act": "sigmoid", "qk_norm": True, "qk_norm_share_param_across_head": True, "rope_base": 500000, "tie_word_embeddings": False,
    "torch_dtype": "float32", "use_cache": True, "use_k_shift": True, "use_output_gate": True, "use_output_norm": True, "use_rope": False,
    "use_v_shift": True, "vocab_size": 53, "window_size": None,
}
PLAIN = dict.fromkeys(("qk_norm", "use_k_shift", "use_output_gate", "use_output_norm", "use_v_shift"), False)
FORMS = {"pro": {}, "plain": PLAIN, "rotary, shifted keys, a norm without a gate": {**PLAIN, "use_k_shift": True, "use_rope": True,
                                                                                    "use_output_norm": True}}


def build(**options):
    """A small float64 GPT with the Pro form and the same weights each time, spread out so that the shares of the shifts differ."""
    torch.manual_seed(0)
    model = from_config({"_target_": "attnzoo.models.GPT", **SIZES, **options}, {"_target_": TARGET, **OPTIONS}).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def ids():
    return torch.randint(53, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def published(config):
    """Random weights by the names and of the shapes that the published ones have."""
    width, heads, hidden = config["hidden_size"], config["num_heads"], 256
    shapes = {"model.embeddings.weight": (config["vocab_size"], width), "model.norm.weight": (width,),
              "lm_head.weight": (config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        layer = {"attn_norm.weight": (width,), "mlp_norm.weight": (width,), "attn.q_proj.weight": (width, width),
                 "attn.o_proj.weight": (width, width), "attn.fgate_proj.weight": (heads, width), "attn.fgate_proj.bias": (heads,),
                 "mlp.gate_proj.weight": (2 * hidden, width), "mlp.down_proj.weight": (width, hidden)}
        for x in "kv":
            if config[f"use_{x}_shift"]:
                layer |= {f"attn.{x}_proj.linear.weight": (width, width), f"attn.{x}_proj.shift_proj.weight": (heads, width)}
            else:
                layer |= {f"attn.{x}_proj.weight": (width, width)}
        if config["qk_norm"]:
            layer |= {f"attn.{x}_norm.weight": (width // heads,) for x in "qk"}
        if config["use_output_gate"]:
            layer |= {"attn.ogate_proj.weight": (width, width)}
        if config["use_output_norm"]:
            layer |= {"attn.output_norm.weight": (width,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def theirs(config, state, ids):
    """Logits of ids (tokens,) in float64, as the authors' code computes them."""
    state = {name: value.double() for name, value in state.items()}
    n, heads, eps = len(ids), config["num_heads"], config["norm_eps"]

    def rms(x, weight, eps=eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    x = state["model.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        w = {name.removeprefix(f"model.layers.{i}."): value for name, value in state.items()}
        h = rms(x, w["attn_norm.weight"])
        q, made = (h @ w["attn.q_proj.weight"].T).view(n, heads, -1), {}
        for name in "kv":
            if config[f"use_{name}_shift"]:
                now = (h @ w[f"attn.{name}_proj.linear.weight"].T).view(n, heads, -1)
                before = torch.cat((torch.zeros_like(now[:1]), now[:-1]))
                share = torch.sigmoid(h @ w[f"attn.{name}_proj.shift_proj.weight"].T)[:, :, None]
                made[name] = share * before + (1 - share) * now
            else:
                made[name] = (h @ w[f"attn.{name}_proj.weight"].T).view(n, heads, -1)
        k, v = made["k"], made["v"]
        if config["qk_norm"]:
            q, k = rms(q, w["attn.q_norm.weight"], 1e-5), rms(k, w["attn.k_norm.weight"], 1e-5)
        if config["use_rope"]:
            half = q.shape[-1] // 2
            angle = torch.arange(n)[:, None, None] * config["rope_base"] ** -(torch.arange(half).double() / half)
            q, k = (torch.cat((y[..., :half] * angle.cos() - y[..., half:] * angle.sin(),
                               y[..., :half] * angle.sin() + y[..., half:] * angle.cos()), -1) for y in (q, k))
        c = F.logsigmoid(h @ w["attn.fgate_proj.weight"].T + w["attn.fgate_proj.bias"]).cumsum(0).T
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1]) + c[:, :, None] - c[:, None]
        weights = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v)
        if config["use_output_norm"]:
            out = rms(out, w["attn.output_norm.weight"].view(heads, -1))
        out = out.flatten(1)
        if config["use_output_gate"]:
            out = out * torch.sigmoid(h @ w["attn.ogate_proj.weight"].T)
        x = x + out @ w["attn.o_proj.weight"].T
        gate, up = (rms(x, w["mlp_norm.weight"]) @ w["mlp.gate_proj.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return rms(x, state["model.norm.weight"]) @ state["lm_head.weight"].T


def save_published(folder, config, state):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", FORMS)
def test_published_weights_give_their_logits(form, ids, tmp_path):
    config = PUBLISHED | FORMS[form]
    state = published(config)
    save_published(tmp_path, config, state)
    ours = from_huggingface(tmp_path).double().eval()
    with torch.no_grad():
        # rotary positions are in float32
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if config["use_rope"] else {}
        assert_close(ours(ids[None])[0], theirs(config, state, ids), **tolerance)
        read = trained.read(str(tmp_path), key="init_from")
        described = json.loads(json.dumps({key: read.record[key] for key in ("model", "attention")}))
        again = from_config(described["model"], described["attention"]).double().eval()
        again.load_state_dict(read.weights)
        assert torch.equal(again(ids[None]), ours(ids[None]))
    assert read.record["tokenizer"] is None and read.record["context"] == 16384


def test_a_tokenizer_is_read_where_it_needs_no_code_of_theirs(tmp_path):
    save_published(tmp_path, PUBLISHED, published(PUBLISHED))
    theirs = to_transformers(ByteTokenizer(), context=16)
    theirs.save_pretrained(tmp_path)
    assert trained.read(str(tmp_path), key="init_from").record["tokenizer"]["kind"] == "huggingface"
    # as it lies beside the published weights; read without their code, which escapes texts first, it would give other tokens
    theirs.backend_tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "JSONGPT2Tokenizer", "add_bos_token": True}))
    assert trained.read(str(tmp_path), key="init_from").record["tokenizer"] is None


@pytest.mark.parametrize("changed, message", [
    ({"fgate_type": "bias_only"}, "fgate_type='bias_only': not supported, must be 'full'"),
    ({"qk_norm_share_param_across_head": False}, "qk_norm_share_param_across_head=False: not supported, must be True"),
    ({"num_kv_heads": 2}, "num_kv_heads=2: not supported"),
])
def test_published_forms_beyond_ours_are_refused(changed, message, tmp_path):
    save_published(tmp_path, PUBLISHED | changed, {"lm_head.weight": torch.zeros(53, 32)})
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path)


def test_incomplete_weights_and_another_attention_are_refused(tmp_path):
    state = published(PUBLISHED)
    save_published(tmp_path, PUBLISHED, state)
    with pytest.raises(ValueError, match="attention: must have the weights' parameter .*fgate_proj"):
        from_huggingface(tmp_path, attention=FlashAttention)
    del state["model.layers.1.attn.v_proj.shift_proj.weight"]
    save_published(tmp_path, PUBLISHED, state)
    with pytest.raises(ValueError, match="lacks the weights .*v_proj.shift_proj"):
        from_huggingface(tmp_path)


@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_no_shift_crosses_a_border_of_packed_or_padded_sequences(positions, ids):
    """Grouped heads; outputs, and the gradients of all parameters, are those of the sequences by themselves."""
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist(), sum(LENGTHS)], dtype=torch.int32)
    packed, single = build(positions=positions).train(), build(positions=positions).train()
    alone = torch.cat([single(part[None])[0] for part in ids.split(LENGTHS) if len(part)])
    found = packed(ids, cu_seqlens=cu_seqlens, max_seqlen=max(LENGTHS))
    assert_close(found, alone)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    rows = torch.zeros(mask.shape, dtype=torch.int64).masked_scatter(mask, ids)
    assert_close(packed(rows, attention_mask=mask)[mask], alone)
    for logits in (found, alone):
        logits.logsumexp(-1).sum().backward()
    for (name, a), b in zip(packed.named_parameters(), single.parameters(), strict=True):
        assert a.grad.any(), name
        assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("positions", ["none", "rotary"])
@pytest.mark.parametrize("options", [{}, {"shift_keys": False}, {"shift_values": False}], ids=str)
def test_the_cache_has_what_the_next_token_takes(options, positions, ids):
    torch.manual_seed(0)
    model = from_config({"_target_": "attnzoo.models.GPT", **SIZES, "positions": positions}, {"_target_": TARGET, **OPTIONS, **options})
    model, caches, rows = model.double().eval(), model.new_cache(2, 10), ids.view(2, 10)
    steps = [model(part, cache=caches) for part in rows.split([4, 1, 1, 3, 1], dim=1)]
    assert_close(torch.cat(steps, dim=1), model(rows))
    assert len(caches[0].buffers) == 3 + sum((OPTIONS | options)[name] for name in ("shift_keys", "shift_values"))


def test_packed_sequences_compile_twice_at_most_as_lengths_change():
    torch._dynamo.reset()
    model, counter = build(n_layers=1), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (9, 10, 16):
        tokens, cu_seqlens = torch.arange(2 * length), torch.tensor([0, length, length + 5, 2 * length, 2 * length], dtype=torch.int32)
        inputs = {"cu_seqlens": cu_seqlens, "max_seqlen": length}
        assert_close(compiled(tokens, **inputs), model(tokens, **inputs))
    assert counter.frame_count <= 2


def test_a_checkpoint_is_exported_and_trained_on(ids, tmp_path):
    sizes = {"qk_norm": True, "attention_gate": "elementwise", "positions": "none", "n_kv_heads": 1}
    model = write_checkpoint(tmp_path / "a.ckpt", attention={"_target_": TARGET, "_partial_": True, **OPTIONS}, **sizes).eval()
    from_checkpoint(tmp_path / "a.ckpt").save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    rows = ids.view(2, 10)
    with torch.no_grad():
        assert torch.equal(again(rows).logits, model(rows))
    expected = model.generate(rows, 70, temperature=0)  # the cache of transformers' generation grows
    assert torch.equal(again.generate(rows, max_new_tokens=70, do_sample=False, eos_token_id=None), expected)
    read = trained.read(str(tmp_path / "saved"), key="init_from")
    assert {key: read.record["attention"][key] for key in OPTIONS} == OPTIONS
    further = checkpoint.rebuild(read.content, read.where).model.eval()
    assert torch.equal(further(rows), model(rows))


def test_shifts_and_the_gate_are_counted():
    plain = from_config({"_target_": "attnzoo.models.GPT", **SIZES, "attention_gate": "none"}, {"_target_": TARGET})
    # of a layer: the output gate's matrix, and the shares of two key heads for keys and for values
    assert build().flops([9, 4]) - plain.flops([9, 4]) == 6 * 13 * 2 * (32 * 32 + 2 * 2 * 32)


SPEC = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "layer": 0, "n_layers": 1, "causal": True, "positions": "none",
        "train_context": 8}


def test_what_it_refuses():
    with pytest.raises(ValueError, match="attention.qk_norm_eps=0.1: has no effect without model.qk_norm=true"):
        ForgettingAttention(AttentionSpec(**SPEC), qk_norm_eps=0.1)
    for option in ("shift_keys", "shift_values"):
        with pytest.raises(ValueError, match="trainer.context_parallel: the token before a part's first one is on another device"):
            ForgettingAttention(AttentionSpec(**SPEC), **{option: True}).check_context_parallel(packed=False)
    ForgettingAttention(AttentionSpec(**SPEC), output_norm=True).check_context_parallel(packed=True)
