"""attnzoo's models through transformers' Auto classes: saved, loaded, generating and training as their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from tiny_run import write_checkpoint
from torch.testing import assert_close

from attnzoo.data.classification import listops_tokenizer
from attnzoo.data.synthetic import listops
from attnzoo.data.tokenizers import ByteTokenizer, NumberTokenizer, fingerprint, from_record
from attnzoo.hub import from_checkpoint
from attnzoo.hub.configs import BERTConfig, GPTConfig
from attnzoo.models import from_config
from attnzoo.trained import read

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).parent.parent / "configs" / "attention"
SUPPORTS = {path.stem: get_class(OmegaConf.load(path)["_target_"]).supports for path in sorted(CONFIGS.glob("*.yaml"))}
SIZES = {"vocab_size": 53, "dim": 32, "n_layers": 2, "n_heads": 4, "train_context": 16, "positions": "rotary"}
KINDS = {"gpt": (GPTConfig, transformers.AutoModelForCausalLM), "bert": (BERTConfig, transformers.AutoModelForMaskedLM)}


def build(kind, variant="flash", **options):
    config, auto = KINDS[kind]
    attention = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{variant}.yaml"))
    torch.manual_seed(0)
    return auto.from_config(config(model={"_target_": f"attnzoo.models.{kind.upper()}", **SIZES, **options}, attention=attention)).eval()


def ids(*shape, seed=0):
    return torch.randint(53, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "variant"), [
    (kind, name) for name, can in SUPPORTS.items() for kind, able in (("gpt", can.causal), ("bert", can.bidirectional)) if able])
def test_a_saved_model_comes_back(kind, variant, tmp_path):
    model = build(kind, variant)
    model.save_pretrained(tmp_path)
    again = KINDS[kind][1].from_pretrained(tmp_path).eval()
    assert type(again) is type(model) and (tmp_path / "model.safetensors").exists()
    assert again.config.model_type == f"attnzoo_{kind}" and again.config.vocab_size == 53
    with torch.no_grad():
        assert torch.equal(again(ids(2, 12)).logits, model(ids(2, 12)).logits)
    half = KINDS[kind][1].from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_loss_are_those_of_the_model(kind):
    model = build(kind)
    tokens, mask = ids(2, 12), torch.arange(12) < torch.tensor([[12], [7]])
    labels = tokens.masked_fill(~mask, -100)
    with torch.no_grad():
        found = model(tokens, attention_mask=mask.long(), labels=labels)
        inner = model.model(tokens, attention_mask=mask)
    assert_close(found.logits, inner)
    shift = int(kind == "gpt")
    expected = torch.nn.functional.cross_entropy(inner[:, : 12 - shift].flatten(0, 1), labels[:, shift:].flatten())
    assert_close(found.loss, expected)
    build(kind).train()(tokens, labels=labels).loss.backward()


@pytest.mark.parametrize("variant", [name for name, can in SUPPORTS.items() if can.causal and can.cache])
def test_generation_with_and_without_the_cache(variant):
    model = build("gpt", variant)
    settings = {"max_new_tokens": 80, "do_sample": False}
    expected = model.model.generate(ids(2, 5), 80, temperature=0)
    assert torch.equal(model.generate(ids(2, 5), **settings), expected)
    assert torch.equal(model.generate(ids(2, 5), use_cache=False, **settings), expected)


def test_beams_and_padded_rows():
    model = build("gpt")
    cached, again = (model.generate(ids(2, 5), max_new_tokens=10, num_beams=3, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, again)
    tokens, mask = ids(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with pytest.raises(ValueError, match="attention_mask: padded rows have no cache here; set use_cache=False"):
        model.generate(tokens, **settings)
    padded = model.generate(tokens, use_cache=False, **settings)
    assert torch.equal(padded[0, 5:], model.generate(tokens[:1, 2:], max_new_tokens=6, do_sample=False)[0, 3:])


def test_a_strangers_config_builds_nothing_of_its_own(tmp_path):
    build("gpt").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attention"] = {"_target_": "os.system", "command": "true"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="outside attnzoo"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config: a attnzoo_gpt needs `model` and `attention`"):
        transformers.AutoModelForCausalLM.from_config(GPTConfig())


def test_a_checkpoint_becomes_a_pretrained_model(tmp_path):
    from attnzoo import checkpoint

    model = {"_target_": "attnzoo.models.GPT", **SIZES}
    attention = {"_target_": "attnzoo.attention.flash.FlashAttention"}
    trained = from_config(model, attention)
    record = {"format": 1, "model": model, "attention": attention, "tokenizer": {"kind": "bytes"}, "task": "lm", "context": 16, "data": {},
              "versions": {}}
    checkpoint.save({"state_dict": {f"model.{k}": v for k, v in trained.state_dict().items()}, "attnzoo": record}, tmp_path / "last.ckpt")
    found = from_checkpoint(tmp_path / "last.ckpt")
    found.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(ids(1, 9)).logits, trained.eval()(ids(1, 9)))


@pytest.mark.slow
@pytest.mark.parametrize("order", (
    "import attnzoo.hub", "from transformers import AutoModelForCausalLM; import attnzoo.hub"))
def test_transformers_knows_ours_whichever_is_imported_first(order, tmp_path):
    build("gpt").save_pretrained(tmp_path / "ours")
    theirs = transformers.LlamaConfig(vocab_size=53, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    transformers.LlamaForCausalLM(theirs).save_pretrained(tmp_path / "theirs")
    code = (f"{order}\n"
            "from transformers import AutoConfig, AutoModelForCausalLM\n"
            "print(AutoConfig.from_pretrained('ours').model_type, type(AutoModelForCausalLM.from_pretrained('ours')).__name__)\n"
            "for name in ('attnzoo_flash', 'attnzoo_block_sparse'):\n"
            "    print(AutoModelForCausalLM.from_pretrained('theirs', attn_implementation=name).config._attn_implementation)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["attnzoo_gpt", "GPTForCausalLM", "attnzoo_flash", "attnzoo_block_sparse"], done.stderr[-1500:]


def test_importing_attnzoo_imports_neither_torch_nor_transformers():
    code = "import sys, attnzoo; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.fixture
def byte_run(tmp_path):
    """A checkpoint of a byte-level GPT, and where it was exported to."""
    trained = write_checkpoint(tmp_path / "a.ckpt")
    from_checkpoint(tmp_path / "a.ckpt").save_pretrained(tmp_path / "saved")
    return trained, tmp_path / "saved"


def test_the_tokenizer_is_exported(byte_run):
    """The same numbers for the same text, and back, through AutoTokenizer."""
    theirs, ours = transformers.AutoTokenizer.from_pretrained(byte_run[1]), ByteTokenizer()
    text = "def f(x):\n\treturn 'é☃🎉'  # <|endoftext|>\r\0 "
    assert theirs(text).input_ids == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.mask_token_id, len(theirs)) == (256, 257, 258, 259)
    broken = torch.randint(256, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    assert theirs.decode(broken) == ours.decode(broken)
    assert theirs.decode([97, 256, 257], skip_special_tokens=True) == ours.decode([97, 256, 257]) == "a"
    assert theirs.model_max_length == 32


def test_a_pipeline_writes_with_what_was_exported(byte_run):
    trained, folder = byte_run
    pipeline = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    (found,) = pipeline("Once", max_new_tokens=8, do_sample=False, return_full_text=True)
    ids = trained.generate(torch.tensor([list(b"Once")]), 8, temperature=0)[0].tolist()
    assert found["generated_text"] == ByteTokenizer().decode(ids[: ids.index(256)] if 256 in ids else ids)


@pytest.mark.parametrize("kind", ["huggingface", "numbers"])
def test_other_tokenizers_are_exported_too(kind, tmp_path):
    ours = listops_tokenizer() if kind == "huggingface" else NumberTokenizer(259)
    write_checkpoint(tmp_path / "a.ckpt", tokenizer=ours.record())
    from_checkpoint(tmp_path / "a.ckpt").save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = " ".join(listops.TOKENS[:3]) if kind == "huggingface" else "3 4 258"
    assert theirs(text).input_ids == ours.encode(text) and theirs.decode(ours.encode(text)) == text
    assert (theirs.eos_token_id, theirs.mask_token_id) == (ours.eos_id, ours.mask_id)
    found = read(str(tmp_path / "saved"), key="ckpt_path").record["tokenizer"]
    assert fingerprint(from_record(found)) == fingerprint(ours)
