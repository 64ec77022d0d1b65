"""attnzoo's operators inside transformers' models: logits as with transformers' own attention, whatever is masked, or a clear refusal."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo.hub import engine, interface
from attnzoo.hub.engine import use_pages
from attnzoo.hub.interface import attention_mask, flash, register, use_block_sparse
from attnzoo_kernels import decode_attention
from attnzoo_kernels.block_sparse.patterns import Pattern
from benchmarks.accuracy import error_ratio

transformers = pytest.importorskip("transformers")
from transformers.generation.continuous_batching import initialization  # noqa: E402
from transformers.generation.continuous_batching.model_runner import ModelRunner  # noqa: E402

register()
in_pages = pytest.mark.skipif(not hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR"), reason="needs transformers 5.20")

PACKAGE = Path(__file__).parents[1] / "attnzoo"

VOCAB, LENGTH = 61, 24
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GQA = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GQA, sliding_window=7)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        **GQA, sliding_window=7, attn_logit_softcapping=3.0, query_pre_attn_scalar=8)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(
        **GQA, sliding_window=7, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
        **SMALL | {"num_hidden_layers": 3}, local_attention=8, global_attn_every_n_layers=3, reference_compile=False)),
}
CAUSAL = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss")
each_model = pytest.mark.parametrize("kind", MODELS)
each_causal = pytest.mark.parametrize("kind", CAUSAL)


def build(kind, implementation, dtype=torch.float64):
    """A small model with the same random weights each time."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and parameter.dim() == 1 else 0.0, std=0.2)
    model.set_attn_implementation(implementation)
    return model.to(dtype).eval()


def ids(*shape):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1))


LENGTHS = (LENGTH, 9, 1)


def side(padding):
    """attention_mask of sequences of LENGTHS."""
    steps, lengths = torch.arange(LENGTH), torch.tensor(LENGTHS)[:, None]
    return (steps < lengths if padding == "right" else steps >= LENGTH - lengths).long()


# the logits are compared in float32: in eager attention the softmax is, whatever the model's dtype


@each_model
def test_whole_rows(kind):
    tokens = ids(3, LENGTH)
    with torch.no_grad():
        ours, eager = (build(kind, name)(tokens).logits.float() for name in ("attnzoo_flash", "eager"))
    assert_close(ours, eager)


@pytest.mark.parametrize("padding", ("right", "left"))
@each_model
def test_padded_rows_read_as_each_sequence_alone(kind, padding):
    mask = side(padding)
    tokens = ids(3, LENGTH) * mask
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if kind in CAUSAL:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    elif padding == "left" and kind == "bert":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        ours = build(kind, "attnzoo_flash")(**inputs).logits[mask.bool()]
        eager = build(kind, "eager")
        alone = [eager(row[real.bool()][None]).logits[0] for row, real in zip(tokens, mask, strict=True)]
    assert_close(ours.float(), torch.cat(alone).float())


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma2"))
def test_packed_rows_are_told_by_their_positions(kind):
    lengths = (11, 1, 12)
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens = ids(1, LENGTH)
    model = build(kind, "attnzoo_flash")
    with torch.no_grad():
        packed = model(tokens, position_ids=position_ids, use_cache=False).logits
        cu_seqlens = torch.tensor([0, 11, 12, 24], dtype=torch.int32)
        told = model(tokens, position_ids=position_ids, use_cache=False, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens,
                     max_length_q=12, max_length_k=12).logits
        single = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    assert_close(packed, single)
    assert_close(told, single)


@pytest.mark.parametrize("padding", (None, "left"))
@each_causal
def test_generation_is_that_of_eager(kind, padding):
    mask = side("left") if padding else torch.ones(3, LENGTH, dtype=torch.int64)
    tokens = ids(3, LENGTH) * mask
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = build(kind, "attnzoo_flash").generate(tokens, attention_mask=mask, **settings)
    eager = build(kind, "eager")
    alone = [eager.generate(row[real.bool()][None], **settings)[0, -12:] for row, real in zip(tokens, mask, strict=True)]
    assert torch.equal(ours[:, -12:], torch.stack(alone))


@pytest.mark.parametrize("length", (LENGTH, 5))
def test_a_decoder_reads_an_encoders_real_tokens(length):
    """Also if there are as many queries as keys, which are other tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, init_std=0.2)).double().eval()
    inputs = {"input_ids": ids(3, LENGTH), "attention_mask": side("right"), "decoder_input_ids": ids(3, length)}
    with torch.no_grad():
        ours, theirs = ((model.set_attn_implementation(name), model(**inputs).logits)[1] for name in ("attnzoo_flash", "sdpa"))
    assert_close(ours, theirs)
    model.set_attn_implementation("attnzoo_block_sparse")
    with pytest.raises(ValueError, match="attention to an encoder's tokens"):
        model(**inputs)


@pytest.mark.parametrize("cut", ((LENGTH - 6, 6), (2, LENGTH - 2), (LENGTH - 6, 1, 5)), ids=str)
@pytest.mark.parametrize("kind", ("llama", "mistral"))
def test_tokens_after_a_cache_may_end_in_padding(kind, cut):
    """As the turns of several conversations do; all rows end in padding, as with a tokenizer's pad_to_multiple_of."""
    tokens, model = ids(3, LENGTH), build(kind, "attnzoo_flash")
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    mask[0, :3] = mask[1, -3:] = mask[:, -1:] = 0
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, logits, end = transformers.DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for part, places in zip(tokens.split(cut, 1), position_ids.split(cut, 1), strict=True):
            end += part.shape[1]
            logits.append(model(part, attention_mask=mask[:, :end], position_ids=places, past_key_values=cache, use_cache=True).logits)
        alone = [model(row[real.bool()][None]).logits[0] for row, real in zip(tokens, mask, strict=True)]
    assert_close(torch.cat(logits, 1)[mask.bool()], torch.cat(alone))


@pytest.mark.parametrize("kind", ("llama", "mistral"))
def test_a_static_cache_is_read_up_to_what_it_holds(kind):
    tokens, model = ids(2, LENGTH), build(kind, "attnzoo_flash")
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        steps = [model(part, past_key_values=cache, use_cache=True, cache_position=torch.arange(start, start + part.shape[1])).logits
                 for start, part in zip((0, 10, 11), tokens.split([10, 1, 13], dim=1), strict=True)]
        assert_close(torch.cat(steps, dim=1), model(tokens).logits)


class NoCopiesFromTheHost(TorchDispatchMode):
    """Raises where a tensor of a CPU is copied to another device, but for those in `torch.tensor`, which it is not shown."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        sources = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
        if function in sources and arguments[sources[function]].is_cpu:
            assert out.is_cpu, f"{function}: a copy from the host"
        return out


WRITTEN = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=VOCAB, pad_token_id=VOCAB)


def written(model, prompts, samples=1, **engine):
    """What transformers' engine writes behind each prompt: the likeliest tokens, or with several samples draws of the likeliest one."""
    how = copy.deepcopy(WRITTEN)
    if samples > 1:
        how.update(do_sample=True, top_k=1, num_return_sequences=samples)
    if model.device.type == "cpu":  # where there is a GPU too, the engine asks for graphs on it
        engine |= {"use_cuda_graph": False, "use_async_batching": False}
    engine = transformers.ContinuousBatchingConfig(num_blocks=24, **engine)
    engine.auto_switch_to_flash = False  # older transformers have no such option and switch to nothing
    found = model.generate_batch(inputs=prompts, generation_config=how, continuous_batching_config=engine, progress_bar=False)
    return [one.generated_tokens for one in found.values()]


def spied(monkeypatch):
    """The calls of decode_attention, as (texts, whether from pages, whether with share_prefixes)."""
    calls = []

    def spy(q, *cache, block_table=None, share_prefixes=False, **options):
        calls.append((q.shape[0], block_table is not None, share_prefixes))
        return decode_attention(q, *cache, block_table=block_table, share_prefixes=share_prefixes, **options)

    monkeypatch.setattr(engine, "decode_attention", spy)
    return calls


@in_pages
@pytest.mark.parametrize("mode", ("gathered", "in pages", "in pages, padded"))
@each_causal
def test_continuous_batching_writes_what_each_prompt_gives_alone(kind, mode, monkeypatch):
    """transformers' engine, which keeps its cache in pages: prompts read in pieces, tokens of several sequences in one call; batches that
    are filled up with empty sequences, as those of CUDA graphs are."""
    padded = mode == "in pages, padded"
    if padded:
        made = ModelRunner.__init__

        def fill_up(self, *arguments, **options):
            made(self, *arguments, **options)
            self.pad_inputs = True

        monkeypatch.setattr(ModelRunner, "__init__", fill_up)
    calls = spied(monkeypatch)
    model = build(kind, "attnzoo_flash", torch.float32)
    if mode == "gathered":
        use_pages(model, gather=True)
    prompts = [ids(1, length)[0].tolist() for length in (5, 30, 2)]
    how = {"page_size": 4 if padded else 16, "max_batch_tokens": 16}
    found = written(model, prompts, **how, max_requests_per_batch=4)
    assert ((4 if padded else 3, True, False) in calls) == (mode != "gathered") == bool(calls)
    if kind not in ("gemma2", "gpt_oss"):  # which transformers lets nobody read with sdpa
        assert found == written(build(kind, "sdpa", torch.float32), prompts, **how)
    calls.clear()
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == model.generate(torch.tensor([prompt]), generation_config=WRITTEN)[0, len(prompt) :].tolist()


@in_pages
@pytest.mark.parametrize("share", (False, True))
def test_samples_in_the_engine_read_the_pages_of_their_prompt(share, monkeypatch):
    calls = spied(monkeypatch)
    model = use_pages(build("llama", "attnzoo_flash", torch.float32), share_prefixes=share)
    prompts = [ids(1, length)[0].tolist() for length in (21, 8)]
    found = written(model, prompts, samples=3, page_size=4, max_batch_tokens=32)
    alone = [text for text in written(build("llama", "sdpa", torch.float32), prompts, page_size=4, max_batch_tokens=32) for _ in range(3)]
    assert found == alone
    assert (6, True, share) in calls


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma2"))
def test_a_cuda_graph_of_packed_rows_waits_for_nothing(kind, monkeypatch):
    """Tensors without values: whatever a shape or the host would read from them raises."""
    monkeypatch.setattr(interface, "_capturing", lambda: True)
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows no device without values
    monkeypatch.setattr(interface, "flash_attention", lambda q, k, v, *, cu_seqlens_q, **_: torch.empty_like(q))
    with torch.device("meta"):
        model = MODELS[kind]().eval()
        tokens, cu_seqlens = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    model.set_attn_implementation("attnzoo_flash")
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": LENGTH, "max_length_k": LENGTH}
    made = torch.tensor

    def on_the_host(*value, device=None, **options):
        assert device is None, "a copy from the host by torch.tensor"
        return made(*value, **options)

    monkeypatch.setattr(torch, "tensor", on_the_host)
    with torch.no_grad(), NoCopiesFromTheHost():
        assert model(tokens, position_ids=tokens, use_cache=False, **told).logits.shape == (1, LENGTH, VOCAB)
        with pytest.raises(ValueError, match="cu_seq_lens_q: must be given"):
            model(tokens, position_ids=tokens, use_cache=False)


@in_pages
@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "share"), (("llama", False), ("llama", True), ("mistral", False), ("gemma2", False)))
def test_the_engine_reads_pages_on_a_gpu(kind, share, monkeypatch):
    """In CUDA graphs, which are captured for powers of two of texts."""
    calls = spied(monkeypatch)
    model = use_pages(build(kind, "attnzoo_flash", torch.float32).cuda(), share_prefixes=share)
    prompts = [ids(1, length)[0].tolist() for length in (21, 8, 1)]
    found = written(model, prompts, samples=3, page_size=16, max_batch_tokens=32, max_requests_per_batch=16)
    expected = [model.generate(torch.tensor([prompt]).cuda(), generation_config=WRITTEN)[0, len(prompt) :].tolist() for prompt in prompts]
    assert found == [text for text in expected for _ in range(3)]
    assert (16, True, share) in calls


@each_model
def test_gradients(kind):
    tokens = ids(2, LENGTH)
    ours, eager = (build(kind, name) for name in ("attnzoo_flash", "eager"))
    for model in (ours, eager):
        model(tokens).logits.logsumexp(-1).mean().backward()
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_close(a.grad.float(), b.grad.float(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
@pytest.mark.parametrize("padding", (None, "left", "right"))
@each_model
def test_kernels_in_bfloat16(kind, padding):
    mask = side(padding).cuda() if padding else torch.ones(3, LENGTH, dtype=torch.int64, device="cuda")
    inputs = {"input_ids": ids(3, LENGTH).cuda() * mask, "attention_mask": mask}
    with torch.no_grad():
        ours, eager, exact = (build(kind, name, dtype).cuda()(**inputs).logits[mask.bool()] for name, dtype in (
            ("attnzoo_flash", torch.bfloat16), ("eager", torch.bfloat16), ("eager", torch.float32)))
    assert error_ratio(ours, eager, exact) <= 1


@pytest.mark.parametrize("kind", ("llama", "mistral", "bert"))
def test_block_sparse_reads_the_blocks_of_its_pattern(kind):
    tokens = ids(2, 48)
    dense, sparse = build(kind, "attnzoo_flash"), build(kind, "attnzoo_flash")
    use_block_sparse(sparse, "dense", block=16)
    with torch.no_grad():
        assert_close(sparse(tokens).logits, dense(tokens).logits)
        use_block_sparse(sparse, "sliding_window", window=1, block=16)
        assert sparse.config._attn_implementation == "attnzoo_block_sparse"
        logits = sparse(tokens).logits
        if kind == "mistral":  # its own window lies inside the pattern's, but for the blocks' first tokens
            assert_close(logits[:, :16], dense(tokens).logits[:, :16])
        mask = Pattern("sliding_window", window=1, block=16, causal=kind != "bert").layout(48).mask
        pairs = mask.repeat_interleave(16, -2).repeat_interleave(16, -1)[0].expand(2, 1, -1, -1)
        if kind != "bert":
            pairs = pairs & torch.ones(48, 48, dtype=torch.bool).tril()
        if kind == "mistral":
            pairs = pairs & torch.ones(48, 48, dtype=torch.bool).triu(-6)
        assert_close(logits, build(kind, "sdpa")(tokens, attention_mask=pairs).logits)


def test_block_sparse_generates_as_it_reads(tmp_path):
    model = build("llama", "attnzoo_flash")
    use_block_sparse(model, "longformer", window=1, block=16)
    generated = model.generate(ids(2, 40), max_new_tokens=6, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        assert torch.equal(model(generated[:, :-1]).logits[:, 39:].argmax(-1), generated[:, 40:])
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attnzoo_block_sparse").eval()
    assert again.config.attnzoo_block_sparse == {"name": "longformer", "window": 1, "block": 16}
    with torch.no_grad():
        assert torch.equal(again(generated).logits, model(generated).logits)


def test_what_a_model_masks_otherwise_is_refused():
    from transformers.masking_utils import chunked_causal_mask_function

    model = build("llama", "attnzoo_flash")
    pairs = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask: must be \(batch, keys\).*sdpa"):
        model(ids(1, 4), attention_mask=pairs)
    with pytest.raises(ValueError, match="position_bias: attn_implementation=\"attnzoo_flash\" does not support it"):
        flash(model, *torch.zeros(3, 1, 2, 4, 8), None, position_bias=torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match="asks for chunked_overlay; load it with attn_implementation=\"sdpa\""):
        attention_mask(1, 4, 4, mask_function=chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ValueError, match="softcap: attn_implementation=\"attnzoo_block_sparse\" does not support it"):
        gemma = build("gemma2", "attnzoo_flash")
        use_block_sparse(gemma)
        gemma(ids(1, 4))
    with pytest.raises(ValueError, match="pattern: must be one of"):
        use_block_sparse(model, "no_such_pattern")


@pytest.mark.slow
def test_the_names_are_there_where_a_folder_hides_the_package(tmp_path):
    """Beside a clone named attnzoo Python takes its folder for the package, and runs no attnzoo/__init__.py."""
    code = ("import sys, types\n"
            "package = sys.modules['attnzoo'] = types.ModuleType('attnzoo')\n"
            f"package.__path__ = [{str(PACKAGE)!r}]\n"
            "import attnzoo.hub\n"
            "from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM\n"
            "assert AutoConfig.for_model('attnzoo_gpt').model_type == 'attnzoo_gpt'\n"
            f"config = LlamaConfig(**{SMALL!r})\n"
            "print(LlamaForCausalLM._from_config(config, attn_implementation='attnzoo_flash').config._attn_implementation)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "attnzoo_flash", done.stderr[-1500:]
