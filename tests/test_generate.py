"""`python generate.py`: what it prints, from which sources, and what it refuses."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from commands import Command
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tiny_run import ROOT, write_checkpoint

from attnzoo import generation, hub
from attnzoo.attention.flash import FlashAttention
from attnzoo.data.tokenizers import ByteTokenizer, NumberTokenizer
from attnzoo.errors import UserError
from attnzoo.run.command_line import as_typed


def config(source, *overrides):
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("generate", overrides=[f"ckpt_path={source}", "accelerator=cpu", *overrides])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of a random model, and the model."""
    path = tmp_path_factory.mktemp("model") / "a.ckpt"
    return path, write_checkpoint(path)


def test_it_goes_on_with_the_prompt_as_the_model_does(source, capsys):
    path, model = source
    generation.generate(config(path, "prompt=Once", "max_new_tokens=12", "temperature=0"))
    ids = model.generate(torch.tensor([list(b"Once")]), 12, temperature=0)[0].tolist()
    end = ids.index(256) if 256 in ids else None
    assert capsys.readouterr().out == ByteTokenizer().decode(ids[:end]) + "\n"


def test_the_seed_and_the_options_of_drawing_count(source, capsys):
    path, _ = source

    def written(*overrides):
        generation.generate(config(path, "prompt=Once", "max_new_tokens=40", *overrides))
        return capsys.readouterr().out

    first = written("temperature=2")
    assert first == written("temperature=2") != written("temperature=2", "seed=1")
    assert written("top_k=1") == written("temperature=0") == written("top_p=1e-6")


def test_the_end_of_text_ends_it(source, capsys, monkeypatch):
    path, _ = source
    ids = [*b"ab", 256, *b"cd"]
    monkeypatch.setattr("attnzoo.models.GPT.stream", lambda *_, **__: (torch.tensor([[i]]) for i in ids))
    generation.generate(config(path, "prompt=x"))
    assert capsys.readouterr().out == "xab\n"


def test_a_file_is_read_as_it_is(source, tmp_path, capsys, monkeypatch):
    """Its line ends, too, which are in the texts that a model is trained on."""
    (tmp_path / "prompt.txt").write_bytes("é\r\nb\r".encode())
    read = []
    monkeypatch.setattr("attnzoo.models.GPT.stream", lambda _, ids, *__, **___: read.append(ids.tolist()) or ())
    generation.generate(config(source[0], f"prompt_file={tmp_path / 'prompt.txt'}"))
    assert read == [[[*"é\r\nb\r".encode()]]] and capsys.readouterr().out == "é\r\nb\r\n"


def test_a_prompt_that_is_not_utf_8_is_named(source):
    """As Python decodes the bytes of a command line."""
    with pytest.raises(ValueError, match=r"prompt: must be UTF-8, got 'a\\udcff'"):
        generation.Writer(config(source[0], "prompt=a")).go_on(b"a\xff".decode("utf-8", "surrogateescape"))


def test_several_samples_are_the_texts_of_as_many_equal_rows(source, capsys, monkeypatch):
    path, model = source
    options = {"temperature": 2.0, "top_k": 50}
    generation.generate(config(path, "prompt=Once", "max_new_tokens=30", "num_samples=3", "seed=5", "temperature=2", "top_k=50"))
    rows = model.generate(torch.tensor([list(b"Once")] * 3), 30, generator=torch.Generator().manual_seed(5), **options).tolist()
    texts = [ByteTokenizer().decode(row[: row.index(256) if 256 in row else None]) for row in rows]
    assert len(set(texts)) == 3
    assert capsys.readouterr().out == "".join(f"[{i} of 3]\n{text}\n" for i, text in enumerate(texts, 1))
    # a text that has ended waits for the others, and nothing of that is shown
    drawn = ([[97], [256]], [[98], [256]], [[256], [256]])
    monkeypatch.setattr("attnzoo.models.GPT.stream", lambda *_, **__: map(torch.tensor, drawn))
    generation.generate(config(path, "prompt=x", "num_samples=2"))
    assert capsys.readouterr().out == "[1 of 2]\nxab\n[2 of 2]\nx\n"


@pytest.mark.parametrize("cached", (True, False))
def test_beams_are_the_likeliest_texts_that_beams_find(cached, tmp_path, capsys, monkeypatch):
    """As a beam search written out that reads everything again; the tokenizer has no end of text."""
    model = write_checkpoint(tmp_path / "a.ckpt", tokenizer={"kind": "numbers", "vocab_size": 259})
    if not cached:
        monkeypatch.setattr(FlashAttention, "supports", replace(FlashAttention.supports, cache=False))
    beams = [(0.0, [1, 2, 3])]
    with torch.no_grad():
        for _ in range(6):
            longer = []
            for score, ids in beams:
                logs = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
                longer += [(score + float(logs[token]), [*ids, token]) for token in range(259)]
            beams = sorted(longer, reverse=True)[:4]
    read, forward = [], type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, ids, **options: (read.append(ids.shape), forward(self, ids, **options))[1])
    for asked, shown in (("num_samples=1", "{0}\n"), ("num_samples=2", "[1 of 2]\n{0}\n[2 of 2]\n{1}\n")):
        generation.generate(config(tmp_path / "a.ckpt", "prompt='1 2 3'", "max_new_tokens=6", "beams=4", asked))
        out, err = capsys.readouterr()
        assert out == shown.format(*(" ".join(map(str, ids)) for _, ids in beams)) and not err
    assert read[:3] == ([(1, 2), (4, 1), (4, 1)] if cached else [(4, 3), (4, 4), (4, 5)])  # the prompt is read once


def test_beams_are_not_searched_in_nan(source, monkeypatch):
    monkeypatch.setattr("attnzoo.models.GPT.forward", lambda self, ids, **_: torch.full((*ids.shape, 259), torch.nan))
    with pytest.raises(ValueError, match="logits are NaN"):
        generation.generate(config(source[0], "prompt=a", "beams=2"))


def test_beams_end_with_the_text(source, capsys):
    """The texts that transformers' search gives on the exported model."""
    path, _ = source
    exported = hub.from_checkpoint(path)
    ids = torch.tensor([list(b"Once")])
    found = exported.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, num_beams=3, do_sample=False)[0].tolist()
    generation.generate(config(path, "prompt=Once", "max_new_tokens=60", "beams=3", "temperature=0"))
    assert capsys.readouterr().out == ByteTokenizer().decode(found[: found.index(256) if 256 in found else None]) + "\n"


def test_exported_folders_run_folders_and_other_readings(source, tmp_path, capsys):
    path, _ = source
    hub.from_checkpoint(path).save_pretrained(tmp_path / "saved")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").write_bytes(path.read_bytes())
    texts = []
    for given in (path, tmp_path / "saved", tmp_path / "run"):
        generation.generate(config(given, "prompt=Once", "max_new_tokens=20", "temperature=0"))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    generation.generate(config(path, "prompt=Once", "max_new_tokens=60", "attention=dual_chunk", "attention.chunk_size=16"))
    assert capsys.readouterr().out.startswith("Once")


def test_interactive_asks_until_the_input_ends(source, capsys, monkeypatch):
    path, _ = source
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    asked = []
    monkeypatch.setattr(generation.Writer, "go_on", lambda self, prompt: asked.append(prompt))
    generation.generate(config(path, "interactive=true"))
    assert asked == ["one", "two"]


def test_an_error_does_not_end_the_conversation(tmp_path, capsys, monkeypatch):
    write_checkpoint(tmp_path / "a.ckpt", tokenizer={"kind": "numbers", "vocab_size": 259})
    monkeypatch.setattr(sys, "stdin", io.StringIO("words\n1 2 3\n"))
    generation.generate(config(tmp_path / "a.ckpt", "interactive=true", "max_new_tokens=3"))
    out, err = capsys.readouterr()
    assert "error: 'words' must be a number" in err and len(out.split()) == 3


def test_control_characters_do_not_reach_a_terminal(capsys, monkeypatch):
    text = "a\x1b[2J\x07\x9b1mé\r\n\tb"
    generation.show(text)
    assert capsys.readouterr().out == text  # a file gets what was written
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generation.show(text)
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\\x9b1mé\\r\n\tb"


def test_characters_are_shown_when_they_are_whole():
    pieces = list(ByteTokenizer().decode_stream([*"é☃".encode(), 257, ord("a"), 0xC3]))
    assert "".join(pieces) == "é☃a\ufffd" and "\ufffd" not in "".join(pieces[:-1]) and pieces.index("é") == 1
    assert "".join(NumberTokenizer(9).decode_stream([1, 2])) == " 1 2"


def test_a_hugging_face_tokenizer_streams_what_it_decodes():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from attnzoo.data.tokenizers import HuggingFaceTokenizer

    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = HuggingFaceTokenizer(backend, "bytes", {"eos": "<end>"})
    ids = tokenizer.encode("é☃ a")
    pieces = list(tokenizer.decode_stream([*ids[:5], tokenizer.eos_id, *ids[5:]]))
    assert "".join(pieces) == "é☃ a" and pieces[0] == "é"
    assert ["".join(tokenizer.decode_stream(ids[n:], ids[:n])) for n in (2, 3, 5)] == ["☃ a", "☃ a", " a"]  # 3: within a character


def test_the_space_before_a_word_is_shown_behind_a_prompt():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from attnzoo.data.tokenizers import HuggingFaceTokenizer

    backend = Tokenizer(models.WordLevel({"▁the": 0, "▁end": 1}, "▁the"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = HuggingFaceTokenizer(backend, "words", {})
    assert "".join(tokenizer.decode_stream([1, 0], after=tokenizer.encode("the"))) == " end the"


@pytest.mark.parametrize(("overrides", "message"), [
    ([], "prompt must be set: add prompt=<text>, prompt_file=<file> or interactive=true"),
    (["prompt=a", "prompt_file=b"], "prompt, prompt_file: set only one of them"),
    (["prompt=''"], "prompt: must have at least one token"),
    (["prompt_file=nowhere.txt"], "prompt_file=nowhere.txt cannot be read"),
    (["prompt=a", "max_new_tokens=0"], "max_new_tokens=0: must be a whole number of at least 1"),
    (["prompt=a", "temperature=-1"], "temperature=-1: must be a number of at least 0"),
    (["prompt=a", "temperature=nan"], "temperature=nan: must be"),
    (["prompt=a", "top_k=0"], "top_k=0: must be"),
    (["prompt=a", "top_p=2"], "top_p=2: must be a number above 0"),
    (["prompt=a", "seed=x"], "seed='x': must be"),
    (["prompt=a", f"seed={2**64}"], f"seed={2**64}: must be a whole number of at least 0"),
    (["prompt=a", "num_samples=0"], "num_samples=0: must be a whole number of at least 1"),
    (["prompt=a", "num_samples=8", "temperature=0"], "num_samples=8: all would be the same text with temperature=0"),
    (["prompt=a", "beams=4", "top_k=3"], "beams=4 does not go with top_k=3"),
    (["prompt=a", "beams=4", "num_samples=5"], "num_samples=5: must be at most the beams=4"),
    (["prompt=a", "interactive=2"], "interactive=2: must be true or false"),
    (["prompt=a", "accelerator=abacus"], "accelerator='abacus': must be"),
    (["prompt=a", "attention=differential"], "do not fit the model"),
])
def test_what_cannot_be_done_is_refused(source, overrides, message):
    with pytest.raises((UserError, ValueError), match=message):
        generation.generate(config(source[0], *overrides))


def test_a_model_that_reads_only_is_told_so(tmp_path):
    write_checkpoint(tmp_path / "a.ckpt", "BERT", "mlm")
    with pytest.raises(UserError, match="holds a BERT, trained for task=mlm: it reads whole texts and writes none; take a GPT"):
        generation.generate(config(tmp_path / "a.ckpt", "prompt=a"))


def test_learned_positions_end(tmp_path, capsys):
    write_checkpoint(tmp_path / "a.ckpt", positions="learned")
    with pytest.raises(ValueError, match="longer than model.max_positions=32"):
        generation.generate(config(tmp_path / "a.ckpt", "prompt=a", "max_new_tokens=40"))
    assert capsys.readouterr().out == "a\n"  # the error begins a line


TYPED = ["f(x): {y}, [z]=1", "it's", "a\\", "\\'", "'quoted'", "${now:x}", "\\${a}", "null", "a\nb", " a ", '"a"', "☃"]


@pytest.mark.parametrize("text", TYPED)
def test_a_prompt_is_taken_as_it_is_typed(text):
    (override,) = OverridesParser.create().parse_overrides([as_typed(f"prompt={text}", ["prompt"])])
    cfg = OmegaConf.create({})
    OmegaConf.update(cfg, override.key_or_group, override.value())
    assert cfg.prompt == text
    assert as_typed("top_k=3", ["prompt"]) == "top_k=3"


@pytest.mark.slow
def test_the_command(source, tmp_path):
    """It writes text and no files, and refuses in one line; an empty folder that it was called in stays."""
    command = [sys.executable, str(ROOT / "generate.py"), f"ckpt_path={source[0]}", "prompt=def f(x):", "max_new_tokens=5", "temperature=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200)
    assert done.returncode == 0 and done.stdout.startswith(b"def f(x):") and done.stderr == b""
    assert tmp_path.is_dir() and not any(tmp_path.iterdir())
    refused = Command("generate.py", f"ckpt_path={source[0]}", "prompt=a", "top_k=0").wait()
    assert refused.returncode == 1 and refused.stderr.strip() == "error: top_k=0: must be a whole number of at least 1 or null"
