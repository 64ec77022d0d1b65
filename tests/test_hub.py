"""Hugging Face weights in and out, with small random models: equal logits both ways, and clear refusals."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close

from attnzoo.attention.flash import FlashAttention
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.hub import config_from_huggingface, from_huggingface, save_huggingface
from attnzoo.models import BERT, GPT, from_config

transformers = pytest.importorskip("transformers")

GPT2 = {"vocab_size": 53, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
BERT_SIZES = {"vocab_size": 53, "max_position_embeddings": 16, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 48}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "train_context": 16, "attention": FlashAttention}
AS_GPT2 = {"positions": "learned", "mlp": "gelu_tanh"}


def random_model(kind, **options):
    """A transformers model whose every parameter is random, biases and norms too."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | options))
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT_SIZES | options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(53, (3, 16), generator=torch.Generator().manual_seed(1))


CASES = [
    ("gpt2", {}), ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 40, "layer_norm_epsilon": 1e-3}),
    ("bert", {}), ("bert", {"tie_word_embeddings": False, "hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
]
each_case = pytest.mark.parametrize("kind, options", CASES, ids=str)


@each_case
@pytest.mark.parametrize("attention", [FlashAttention, SDPAttention])
def test_logits_equal_those_of_transformers(kind, options, attention, tokens):
    theirs = random_model(kind, **options)
    ours = from_huggingface(theirs, attention=attention).eval()
    with torch.no_grad():
        # within the 1e-4 that the zoo promises
        assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
        mask = torch.arange(16) < torch.tensor([[16], [5], [1]])
        real = theirs(tokens, attention_mask=mask.long()).logits[mask]
        assert_close(ours(tokens, attention_mask=mask)[mask], real, rtol=0, atol=1e-4)


def test_token_types_equal_those_of_transformers(tokens):
    theirs = random_model("bert")
    types = (tokens > 26).long()
    with torch.no_grad():
        assert_close(from_huggingface(theirs).eval()(tokens, token_type_ids=types), theirs(tokens, token_type_ids=types).logits,
                     rtol=0, atol=1e-4)


@each_case
def test_saved_and_loaded_weights_are_the_same(kind, options, tokens, tmp_path):
    theirs = random_model(kind, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = from_huggingface(tmp_path / "theirs").eval()
    save_huggingface(ours, tmp_path / "ours", eos_token_id=2)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir() if path.suffix == ".safetensors") == ["model.safetensors"]
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.eos_token_id == 2 and again.config.bos_token_id is None
    state = theirs.state_dict()
    for name, tensor in again.state_dict().items():
        # transformers ties no bias of an untied BERT head, and reads this copy nowhere
        if name != "cls.predictions.bias":
            assert torch.equal(tensor, state[name]), name
    with torch.no_grad():
        assert_close(again.eval()(tokens).logits, theirs(tokens).logits)
    loaded = from_huggingface(tmp_path / "ours").eval()
    assert torch.equal(loaded(tokens), ours(tokens))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_model_of_ours_is_read_by_transformers(kind, tokens, tmp_path):
    torch.manual_seed(0)
    if kind == "gpt2":
        ours, theirs = GPT(**SIZES, **AS_GPT2, pad_vocab_multiple=64), transformers.GPT2LMHeadModel
    else:
        ours, theirs = BERT(**SIZES, positions="learned", norm_position="post", type_vocab_size=1), transformers.BertForMaskedLM
    save_huggingface(ours, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [theirs.__name__]
    with torch.no_grad():
        assert_close(theirs.from_pretrained(tmp_path).eval()(tokens).logits, ours.eval()(tokens), rtol=0, atol=1e-4)


def test_dropout_is_the_configs():
    gpt = from_huggingface(random_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.2))
    bert = from_huggingface(random_model("bert", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2))
    for model in (gpt, bert):
        assert model.training
        assert (model.embedding_dropout.p, model.blocks[0].dropout.p, model.blocks[0].attention.spec.dropout) == (0.3, 0.3, 0.2)


def test_the_description_is_plain_and_builds_the_same_model(tokens):
    theirs = random_model("gpt2")
    description = json.loads(json.dumps(config_from_huggingface(theirs.config)))
    ours = from_huggingface(theirs)
    again = from_config(description, {"_target_": "attnzoo.attention.sdpa.SDPAttention"})
    again.load_state_dict(ours.state_dict())
    assert_close(again.eval()(tokens), ours.eval()(tokens))


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("gpt2", {"activation_function": "relu"}, "activation 'relu': not supported, must be one of gelu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True: not supported, must be False"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop=0.2: not supported, must be 0.1"),
        ("bert", {"is_decoder": True}, "bert config is_decoder=True"),
    ],
)
def test_a_config_beyond_our_models_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(random_model(kind, **options))


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a GPT2LMHeadModel, got GPT2Model"):
        from_huggingface(transformers.GPT2Model(transformers.GPT2Config(**GPT2)))
    transformers.MambaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type='mamba': must be one of gpt2, bert, llama, qwen3, phi3"):
        from_huggingface(tmp_path)


def test_a_trunk_without_its_head_is_refused(tmp_path):
    random_model("bert").bert.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks the weights .*cls.predictions.*; it must be saved from a BertForMaskedLM"):
        from_huggingface(tmp_path)


def _shorten(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BREAKAGES = {
    "no folder": lambda folder: shutil.rmtree(folder),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half a config": lambda folder: _shorten(folder / "config.json"),
    "half the weights": lambda folder: _shorten(folder / "model.safetensors"),
    "other sizes": lambda folder: transformers.GPT2Config(**GPT2 | {"n_embd": 64}).save_pretrained(folder),
    "foreign code": lambda folder: (folder / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoConfig": "x.Y"}}'),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_checkpoints_give_one_line(breakage, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    random_model("gpt2").save_pretrained(tmp_path / "model")
    BREAKAGES[breakage](tmp_path / "model")
    with pytest.raises(ValueError, match=r"source='.*model': must be a folder with config.json and weights") as error:
        from_huggingface(tmp_path / "model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "cls, options, message",
    [
        (GPT, {}, "GPT-2 cannot hold this model; it needs model.positions=learned"),
        (GPT, AS_GPT2 | {"norm": "rmsnorm"}, "model.norm=layernorm"),
        (GPT, AS_GPT2 | {"norm_position": "post"}, "model.norm_position=pre"),
        (GPT, AS_GPT2 | {"mlp": "swiglu", "bias": False}, "model.mlp=gelu or gelu_tanh; model.bias=true"),
        (GPT, AS_GPT2 | {"n_kv_heads": 2}, "n_kv_heads = n_heads"),
        (GPT, AS_GPT2 | {"attention": lambda spec: FlashAttention(spec, window_size=(4, 0))}, "without window"),
        (BERT, {"positions": "learned"}, "model.norm_position=post; model.type_vocab_size of at least 1"),
    ],
)
def test_a_model_beyond_their_architecture_is_refused(cls, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_huggingface(cls(**SIZES | options), tmp_path)
    assert not any(tmp_path.iterdir())
