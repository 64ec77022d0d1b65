"""Block-sparse attention in CUDA graphs, torch.compile's and one's own: what graphs read of layouts is kept, outside their memory."""

import contextlib

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from attnzoo.attention.block_sparse import BlockSparseAttention
from attnzoo.models import GPT
from attnzoo_kernels import block_sparse_attention, dispatch
from attnzoo_kernels.block_sparse import layout_cache, patterns

PATTERNS = [{"name": "bigbird", "window": 0, "n_random": 1}, {"name": "sliding_window", "window": 1}]
LENGTHS = (640, 520)
CPU = torch.device("cpu")


def build(head_dim, block):
    torch.manual_seed(0)
    return GPT(vocab_size=61, dim=64, n_layers=2, n_heads=2, head_dim=head_dim, train_context=max(LENGTHS), positions="rotary",
               attention=lambda spec: BlockSparseAttention(spec, pattern=PATTERNS, block=block)).cuda()


def batches(rounds):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(61, (2, length), generator=generator).cuda() for _ in range(rounds) for length in LENGTHS]


def loss_of(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    patterns._cache.recent.clear()
    patterns._cache.captured.clear()
    yield
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, head_dim, block, path", [(torch.float32, 16, 32, "triton"), (torch.bfloat16, 64, 128, None)], ids=str)
def test_training_in_graphs_gives_the_uncompiled_losses(dtype, head_dim, block, path):
    autocast = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype)

    def train(loss):
        model = build(head_dim, block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for tokens in batches(4):
            torch.compiler.cudagraph_mark_step_begin()
            with autocast:
                value = loss(model, tokens)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach().clone())
        return torch.stack(losses).to(dtype), model

    eager, _ = train(loss_of)
    dispatch.forget()
    graphs, model = train(torch.compile(loss_of, mode="reduce-overhead"))
    taken = dispatch.implementations_taken()
    assert path is None or all(taken[f"block_sparse {name}"] == [path] for name in ("forward", "backward"))
    assert_close(graphs, eager)
    assert patterns._cache.captured, "no capture found a layout that the warm-up had made"
    # other lengths push out what is recent, and not what a graph reads
    compiled = torch.compile(loss_of, mode="reduce-overhead")
    model.eval()
    with torch.no_grad(), autocast:
        for _ in range(2):
            for tokens in batches(3):
                torch.compiler.cudagraph_mark_step_begin()
                assert_close(compiled(model, tokens).to(dtype), loss_of(model, tokens).to(dtype))
            for length in range(1, patterns._cache.limit + 1):
                model(tokens[:, : length * block % LENGTHS[0] + 1])
    prompt = tokens[:, :40]
    assert torch.equal(model.generate(prompt, 3, temperature=0), model.generate(prompt, 3, temperature=0))


@pytest.mark.gpu
@pytest.mark.parametrize("cross_documents", ("true", "false"))  # rows of one sequence, or packed ones
def test_the_trainer_s_graphs_give_the_uncompiled_losses(tmp_path, cross_documents):
    from tiny_run import column, compose_tiny

    from attnzoo import runner

    losses = []
    for mode in ("false", "reduce-overhead"):
        runner.train(compose_tiny(
            tmp_path / mode, "trainer=gpu", "attention=block_sparse", "attention.pattern=[{name:bigbird,window:0,n_random:1},dense]",
            "attention.block=16", "data.seq_len=128", f"data.cross_documents={cross_documents}", f"compile={mode}"))
        losses.append(torch.tensor([float(loss) for loss in column(tmp_path / mode, "train/loss")]))
    assert len(losses[0]) == 12
    assert_close(losses[1].bfloat16(), losses[0].bfloat16())


@pytest.mark.gpu
def test_a_graph_of_ones_own_reads_lists_that_were_there_before():
    pattern = patterns.Pattern("longformer", block=64)
    q = torch.randn(1, 600, 2, 64, device="cuda", dtype=torch.bfloat16)

    def call():
        return block_sparse_attention(q, q, q, pattern, causal=True)

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for blocks in range(1, 2 * patterns._cache.limit):
        pattern.layout(64 * blocks, q.device)
    freed = [torch.full((1 << 16,), 1 << 20, dtype=torch.int32, device="cuda") for _ in range(64)]
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected) and freed


def test_the_last_values_are_kept_and_all_that_a_capture_found(monkeypatch):
    made = []

    def get(key):
        return values.get(key, CPU, lambda: made.append(key) or key)

    values = layout_cache.LayoutCache(2)
    assert [get(key) for key in "abaca"] == list("abaca") and made == list("abc")
    assert get("b") == "b" and made == list("abcb")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda = torch.device("cuda", 0)
    assert values.get("a", cuda, lambda: "new") == "a" and values.get("d", cuda, lambda: "new") == "new"
    assert values.get("d", cuda, lambda: "again") == "again"
    monkeypatch.undo()
    for key in "efg":
        get(key)
    assert get("a") == "a" and made == list("abcbefg")


def test_what_a_compiled_call_makes_is_asked_for_apart(monkeypatch):
    apart = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(layout_cache, "_made_apart", lambda make, device: apart.append(device) or make())
    values, cuda = layout_cache.LayoutCache(4), torch.device("cuda", 0)
    values.get(1, cuda, list)
    with layout_cache.made_apart():
        values.get(2, cuda, list)
        values.get(3, CPU, list)
    values.get(4, cuda, list)
    assert apart == [cuda]
