"""The benchmarks' logic on the CPU: fair order, the accuracy rule, what gets a figure, tables and files, the whole command as a dry run."""

import contextlib
import csv
import dataclasses
import math
import subprocess
import sys
import types

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from tiny_run import ROOT, write_checkpoint

from attnzoo_kernels import flash_attention
from attnzoo_kernels.block_sparse import cases as block_sparse_cases
from attnzoo_kernels.flash import cases
from attnzoo_kernels.flash.cases import Case
from attnzoo_kernels.flash.reference import visible
from attnzoo_kernels.routed import cases as routed_cases
from benchmarks import block_sparse, cpu, decode, flash, forgetting, harness, peers, report, routed, timing
from benchmarks.accuracy import error_ratio
from benchmarks.harness import Backend, Entry, Line, Pass, Unsupported
from benchmarks.timing import Candidate, Timing

SMALL = Case(batch=2, seqlen_q=24, heads=4, kv_heads=2, head_dim=16, causal=True)


def test_measure_pauses_and_changes_the_order(monkeypatch):
    log, open_scopes = [], []
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: log.append(seconds))

    @contextlib.contextmanager
    def scope(name):
        open_scopes.append(name)
        yield
        open_scopes.remove(name)

    def bench(call, warmup, rep):
        assert open_scopes == [call()]
        log.append(call())
        return 1.0

    candidates = {name: Candidate(lambda name=name: name, lambda name=name: scope(name)) for name in "abcd"}
    readings = Timing(rounds=5, pause=0.1, bench=bench).measure(candidates)
    assert {name: len(times) for name, times in readings.items()} == dict.fromkeys("abcd", 5)
    assert log[::2] == [0.1] * 20
    rounds = [tuple(log[1::2][i : i + 4]) for i in range(0, 20, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.parametrize(("asked", "taken"), [([], ["usual"]), (["--backends", "asked for"], ["asked for"])])
def test_a_backend_on_request_is_taken_by_name_only(asked, taken):
    backends = {name: Backend(name, unsupported, on_request=name != "usual") for name in ("usual", "asked for")}
    seen = []

    def table(session):
        seen.extend(backend.name for backend in session.backends)
        return iter(())

    harness.main(harness.parser("op", ["speed"], list(backends)), {"speed": table}, backends, None, {}, ["--dry-run", *asked])
    assert seen == taken


@pytest.mark.parametrize(("milliseconds", "calls", "reading"), [(57, 1, 0.25), (59, 2, 59)])
def test_a_call_longer_than_a_reading_runs_twice(monkeypatch, milliseconds, calls, reading):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("triton.testing.do_bench", lambda call, **_: 0.25)
    ran = []

    def call():
        ran.append(clock[0])
        clock[0] += milliseconds / 1e3

    assert timing.device_bench(call, warmup=8, rep=50) == pytest.approx(reading)
    assert len(ran) == calls


def test_error_ratio_is_the_share_of_the_rule():
    torch.manual_seed(0)
    exact = torch.randn(64, 64, dtype=torch.float64)
    eager = exact.bfloat16()
    assert error_ratio(eager, eager, exact) <= 0.5
    assert error_ratio(exact.float().mul(1.05).bfloat16(), eager, exact) > 1
    shifted = eager.clone()
    shifted[3, 5] += 1  # one element: the mean hardly sees it, the maximum does
    assert error_ratio(shifted, eager, exact) > 1
    shifted[3, 5] = math.nan
    assert error_ratio(shifted, eager, exact) == math.inf
    assert error_ratio(exact[:0], eager[:0], exact[:0]) == 0
    assert error_ratio(torch.zeros(3), torch.zeros(3), torch.zeros(3)) == 0
    with pytest.raises(ValueError, match="shape"):
        error_ratio(eager[0], eager, exact)


def broken(change):
    """The reference with its results changed by `change(out, dq, dk, dv)`."""

    def make(case, x):
        right = peers.attnzoo("reference")(case, x)
        return Pass(lambda: change(right.forward(), *right.backward())[0], lambda: change(right.forward(), *right.backward())[1:], [])

    return make


def unwritten(out, dq, dk, dv):
    last = dk.clone()
    last[-1, -1, -1, 0] = math.nan
    return out, dq, last, dv


BROKEN = {
    "output off by 5 %": lambda out, dq, dk, dv: (out * 1.05, dq, dk, dv),
    "gradients swapped": lambda out, dq, dk, dv: (out, dq, dv, dk),
    "heads in another order": lambda out, dq, dk, dv: (out.flip(2), dq, dk, dv),
    "one value left unwritten": unwritten,
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_wrong_result_does_not_pass_the_check(change):
    x = SMALL.inputs()
    assert flash.Check(SMALL, x, ["forward", "backward"])(peers.attnzoo("reference")(SMALL, x)) <= 1
    assert not flash.Check(SMALL, x, ["forward", "backward"])(broken(change)(SMALL, x)) <= 1


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        dataclasses.replace(SMALL, alibi=True, sinks=True, softcap=5.0),
        dataclasses.replace(SMALL, dropout_p=0.3),
        Case(lengths_q=(7, 0, 19), heads=4, kv_heads=2, head_dim=16, alibi=True, causal=True),
    ],
    ids=str)
def test_the_check_s_slices_are_the_full_problem_s(case):
    x = case.inputs()
    check = flash.Check(case, x, ["forward", "backward"])
    assert check(peers.attnzoo("reference")(case, x)) <= 1


def entry(label, make, milliseconds=None, limit=1.0):
    """A column whose pass says how long it takes, for a bench that believes it."""
    backend = Backend(label, make or (lambda case, x: Pass(lambda: milliseconds, lambda: 2 * milliseconds, [])), limit=limit)
    return Entry(label, backend, SMALL, None, {"forward": 4e9, "backward": 10e9}, lambda run: {"wrong": 1.2, "rough": 1.2}.get(label, 0.5))


def unsupported(case, x):
    raise Unsupported("cannot do: this")


def failing(case, x):
    raise RuntimeError("\nout of luck\nand more")


@pytest.fixture
def compared():
    columns = [
        entry("ours", None, 1.0), entry("slower", None, 2.0), entry("wrong", None, 0.1), entry("rough", None, 4.0, limit=1.5),
        entry("unsupported", unsupported), entry("failing", failing),
    ]
    believing = Timing(rounds=3, pause=0, bench=lambda call, warmup, rep: call())
    return harness.compare(Line("op", "speed", "d16", 24), columns, ["forward", "backward"], believing)


def test_compare_gives_rates_ratios_and_reasons(compared):
    rows = {(row.label, row.direction): row for row in compared}
    assert rows["ours", "forward"].value == pytest.approx(4)  # 4e9 operations in a millisecond
    assert rows["ours", "backward"].value == pytest.approx(5)
    assert (rows["slower", "forward"].value, rows["slower", "forward"].ratio) == (pytest.approx(2), pytest.approx(2))
    assert rows["ours", "forward"].spread == 0
    assert rows["rough", "forward"].value == pytest.approx(1)
    assert rows["rough", "forward"].note == "1.20 times the allowed error"
    assert {label: rows[label, "forward"].note for label in ("wrong", "unsupported", "failing")} == {
        "wrong": "1.20 times the allowed error", "unsupported": "cannot do: this", "failing": "RuntimeError: out of luck",
    }
    assert all(rows[label, "forward"].value is None for label in ("wrong", "unsupported", "failing"))


def test_late_ones_are_compared_after_the_others_with_the_baseline():
    late = entry("late", None, 2.0)
    late = dataclasses.replace(late, backend=dataclasses.replace(late.backend, late=True))
    columns = [entry("ours", None, 1.0), late, entry("slower", None, 4.0)]
    believing = Timing(rounds=1, pause=0, bench=lambda call, warmup, rep: call())
    parts = list(harness.compare_late_ones_last(Line("op", "speed", "d16", 24), columns, ["forward"], believing))
    assert [[(row.label, row.ratio) for row in part] for part in parts] == [[("ours", 1.0), ("slower", 4.0)], [("late", 2.0)]]


def test_ratio_of_a_cost_is_turned_round():
    ready = harness.Prepared({}, {}, {})
    columns = [entry("ours", None, 1.0), entry("peer", None, 1.0)]
    rows = Line("op", "memory", "d16", 24).rows(columns, ready, "forward", "MB", {"ours": 10.0, "peer": 15.0})
    assert [row.ratio for row in rows] == [1.0, 1.5]  # ours is 1.5 times better


def test_table_and_files(compared, tmp_path):
    lines = report.table(compared).splitlines()
    assert lines[0].split() == ["ours", "slower", "rough"]
    assert lines[1].split() == ["d16", "24", "forward,", "TFLOP/s", "4", "2", "(2.00x)", "1", "(4.00x)"]
    assert "- failing: RuntimeError: out of luck (d16 24 forward and 1 more)" in lines
    report.write_csv(compared, {"gpu": "none", "torch": "2"}, tmp_path / "new" / "op.csv")
    with (tmp_path / "new" / "op.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(compared)
    assert (written[1]["label"], float(written[1]["value"]), written[1]["torch"]) == ("slower", 2.0, "2")
    assert written[2]["value"] == ""
    report.plot(compared, tmp_path / "op.png", "sequence length", "title")
    assert (tmp_path / "op.png").read_bytes().startswith(b"\x89PNG")


def test_no_two_curves_of_a_panel_have_one_colour(compared, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append(self))
    report.plot([dataclasses.replace(compared[0], label=str(i)) for i in range(12)], tmp_path / "op.png", "sequence length", "title")
    assert len({to_hex(line.get_color()) for line in figures[0].axes[0].lines}) == 12


MASKS = [
    Case(seqlen_q=20, causal=True),
    Case(seqlen_q=9, seqlen_k=20, causal=True),
    Case(seqlen_q=20, seqlen_k=9, window_size=(3, 2)),
    Case(seqlen_q=20, window_size=(4, -1), causal=True),
]


@pytest.mark.parametrize("case", MASKS, ids=str)
def test_flex_mask_is_the_operator_s(case):
    (m, n), right = case.lengths[0], 0 if case.causal else case.window_size[1]
    expected = visible(torch.tensor([m]), torch.tensor([n]), m, n, (case.window_size[0], right))[0, 0]
    assert torch.equal(peers.flex_mask(case, "cpu")(0, 0, torch.arange(m)[:, None], torch.arange(n)), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=2, seqlen_q=40, heads=2, head_dim=16),
        Case(batch=2, seqlen_q=40, heads=4, kv_heads=2, head_dim=16, causal=True),
        Case(seqlen_q=40, heads=2, head_dim=16, window_size=(8, 4), softcap=3.0, alibi=True),
        Case(lengths_q=(13, 0, 27), heads=2, head_dim=16, causal=True),
    ],
    ids=str)
def test_flex_computes_the_case(monkeypatch, case):
    from torch.nn.attention.flex_attention import flex_attention

    # uncompiled, and without gradients, which it lacks on a CPU
    monkeypatch.setattr(peers, "compiled_flex_attention", lambda: lambda q, k, v, **options: flex_attention(
        q.detach(), k.detach(), v.detach(), **options))
    x = case.inputs()
    assert flash.Check(case, x, ["forward"])(peers.flex(case, x)) <= 1


@pytest.mark.parametrize("change", [{"alibi": True}, {"sinks": True}, {"softcap": 1.0}, {"window_size": (1, 1)}, {"seqlen_k": 9}])
def test_sdpa_refuses_what_it_would_compute_otherwise(change):
    case = dataclasses.replace(SMALL, **change)
    with pytest.raises(Unsupported, match="cannot do"):
        peers.BACKENDS["sdpa-fa2"].make(case, case.inputs())


@pytest.mark.slow
def test_dry_run_covers_every_table(tmp_path, capsys):
    arguments = ["--dry-run", *flash.TABLES, "--backends", "attnzoo-reference", "sdpa-fa2", "--output", str(tmp_path), "--name", "tiny"]
    assert flash.main(arguments) == 0
    text = capsys.readouterr().out
    assert "dry run" in text
    rows = [row for name in flash.TABLES for row in csv.DictReader((tmp_path / f"tiny-{name}.csv").read_text().splitlines())]
    ours = [row for row in rows if row["label"].startswith("attnzoo") or row["panel"].startswith("attnzoo")]
    assert {row["table"] for row in ours} == set(flash.TABLES)
    assert all(row["value"] and row["torch"] for row in ours)
    assert not any("Error" in row["note"] for row in rows)
    assert {row["label"] for row in rows if row["table"] == "features"} == {"plain", *cases.feature_cases(SMALL)}
    assert {path.name for path in tmp_path.glob("*.png")} == {"tiny-speed.png", "tiny-packed.png", "tiny-memory.png"}


@pytest.mark.slow
def test_dry_run_of_routed_covers_every_table(tmp_path, capsys):
    assert routed.main(["--dry-run", *routed.TABLES, "--output", str(tmp_path)]) == 0
    for name in routed.TABLES:
        assert all(row["value"] for row in csv.DictReader((tmp_path / f"routed-{name}.csv").read_text().splitlines()))


def test_the_gates_of_a_checkpoint_are_measured(tmp_path, capsys):
    layer = {"_target_": "attnzoo.attention.forgetting.ForgettingAttention"}
    model = write_checkpoint(tmp_path / "some.ckpt", attention=layer, positions="none")
    assert forgetting.main(["--dry-run", "trained", "--checkpoint", str(tmp_path / "some.ckpt"), "--output", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "forgetting-trained.csv").read_text().splitlines()))
    assert {row["panel"].split(",")[0] for row in rows} == {"layer 0", "layer 1"} and all(row["value"] for row in rows)
    first = forgetting.layers_of(str(tmp_path / "some.ckpt"), 32, "cpu", torch.float32)[0]
    assert first.heads == model.blocks[0].attention.spec.n_heads and first.inputs().log_f.shape == (1, 32, first.heads)


@pytest.mark.parametrize("size", (32, 64, 128, 512))
def test_flex_reads_the_tiles_of_chosen_blocks(size):
    seqlen, tile = 1024, routed.TILE
    count, own = seqlen // size, torch.arange(seqlen) // size
    read = (torch.rand(1, 2, seqlen, count) < 0.1) & (torch.arange(count) < own[:, None])
    read[:, :, 512:640] = True  # one tile of queries reads all before it
    read = read & (torch.arange(count) <= own[:, None]) | torch.nn.functional.one_hot(own, count).bool()
    partial, partial_at, full, full_at = routed.flex_lists(read, size)
    seen = read.repeat_interleave(size, dim=3) & torch.ones(seqlen, seqlen, dtype=torch.bool).tril()
    seen = seen.unflatten(2, (-1, tile)).unflatten(4, (-1, tile)).transpose(3, 4).flatten(4)
    counts, some = torch.stack((partial, full)), torch.zeros(2, *seen.shape[:4], dtype=torch.bool)
    for n, places in enumerate((partial_at, full_at)):
        some[n].scatter_(-1, places.long(), torch.arange(places.shape[-1]) < counts[n][..., None])
    assert torch.equal(some[0] ^ some[1], seen.any(-1)) and torch.equal(some[1], seen.all(-1))


def attention_to(seen, q, k, v):
    """seen: bool (heads, seqlen, seqlen). Others (seqlen, heads or kv_heads, head_dim)."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)[0].transpose(0, 1)


def tokens_seen(blocks, size, heads):
    """What lists of blocks by key head, behind which -1 stands, show causally: bool (heads, seqlen, seqlen)."""
    seqlen = blocks.shape[1]
    assert (blocks[..., 1:].where(blocks[..., 1:] >= 0, seqlen) > blocks[..., :-1]).all()  # in ascending order
    own = torch.arange(seqlen) // size
    read = torch.stack([(blocks == block).any(-1) for block in range(int(own[-1]) + 1)], -1)
    return (read[..., own] & torch.ones(seqlen, seqlen, dtype=torch.bool).tril()).repeat_interleave(heads // blocks.shape[0], 0)


@pytest.fixture
def chosen_blocks():
    case = routed_cases.Case(seqlen_q=150, heads=6, kv_heads=2, head_dim=16, block_size=32, slots=3, shared=True)
    q, k, v, blocks, dout, _ = case.inputs()

    def call(q, k, v, *, blocks, impl):
        return routed.routed_attention(q, k, v, blocks, block_size=case.block_size, impl=impl)

    return case, routed.Problem([q, k, v], dout, blocks, call)


@pytest.mark.parametrize(("name", "module", "function"), [
    ("nsa-triton", "native_sparse_attention.ops", "topk_sparse_attention"), ("fsa", "fsa.ops", "FSA_topk_sparse_attention")])
def test_other_nsas_are_given_the_same_blocks(monkeypatch, chosen_blocks, name, module, function):
    """With a stand-in for their kernels, which takes what these take."""
    def attend(q, k, v, blocks, size, bounds):
        assert blocks.is_contiguous() and blocks.dtype == bounds.dtype == torch.int32 and bounds.tolist() == [0, q.shape[0]]
        return attention_to(tokens_seen(blocks, size, q.shape[1]), q, k, v)

    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{function: attend}))
    case, x = chosen_blocks
    assert routed.Check(case, x, ["forward", "backward"])(routed.BACKENDS[name].make(case, x)) <= 1
    with pytest.raises(Unsupported, match="32, 64, 128 or 256"):
        routed.BACKENDS[name].make(dataclasses.replace(case, block_size=16), x)


def test_the_nsa_of_cudnn_is_given_the_same_blocks(monkeypatch, chosen_blocks):
    def attend(q, k, v, blocks, counts, *bounds, block_size, is_causal, **options):
        blocks = blocks.transpose(0, 1)
        assert is_causal and torch.equal((blocks >= 0).sum(-1).T, counts) and counts.dtype == torch.int32
        return {"o_tensor": attention_to(tokens_seen(blocks, block_size, q.shape[1]), q, k, v)}

    namespace = types.SimpleNamespace(NSA=types.SimpleNamespace(selection_attention_wrapper=attend))
    monkeypatch.setitem(sys.modules, "cudnn", namespace)
    case, x = chosen_blocks
    run = routed.BACKENDS["nsa-cudnn"].make(case, x)
    assert routed.Check(case, x, ["forward"])(run) <= 1
    with pytest.raises(Unsupported, match="--directions forward"):
        run.backward()


def test_the_block_sparse_attention_of_cudnn_is_given_the_same_blocks(monkeypatch):
    def whole(q, k, v, lists, size):
        index, counts = lists["q2k_block_index"], lists["q2k_block_nums"]
        kept = torch.zeros(*index.shape[:3], k.shape[1] // size, dtype=torch.bool)
        kept.scatter_(-1, index.long(), torch.arange(index.shape[-1]) < counts[..., None])
        return attention_to(kept[0].repeat_interleave(size, 1).repeat_interleave(size, 2), *(t[0] for t in (q, k, v)))[None]

    def forward(q, k, v, *, sparse_block_size, layout, **lists):
        assert layout == "bshd"
        return {"o_tensor": whole(q, k, v, lists, sparse_block_size), "lse_tensor": q.new_zeros(())}

    def backward(dout, q, k, v, out, lse, *, sparse_block_size, layout, **lists):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        return dict(enumerate(torch.autograd.grad(whole(*leaves, lists, sparse_block_size), leaves, dout)))

    functions = {"block_sparse_attention_forward": forward, "block_sparse_attention_backward": backward}
    monkeypatch.setitem(sys.modules, "cudnn", types.SimpleNamespace(BSA=types.SimpleNamespace(**functions)))
    case = block_sparse_cases.Case(seqlen_q=256, heads=3, head_dim=16, block_q=64, masks="head", diagonal=True)
    x = case.inputs()
    assert block_sparse.Check(case, x, ["forward", "backward"])(block_sparse.cudnn(case, x)) <= 1
    with pytest.raises(Unsupported, match="--full"):
        block_sparse.cudnn(dataclasses.replace(case, causal=True), x)


def test_a_package_that_is_missing_is_named():
    missing = peers.importable("no_such_package.ops", where="a checkout of it")()
    assert "no_such_package" in missing and missing.endswith("a checkout of it")


@pytest.mark.slow
def test_dry_run_of_block_sparse_without_a_causal_mask(tmp_path):
    assert block_sparse.main(["--dry-run", "density", "--full", "--output", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "block_sparse-density.csv").read_text().splitlines()))
    assert all(row["value"] and row["panel"].endswith(", full") and "-full" in row["case"] for row in rows)


@pytest.mark.slow
def test_dry_run_of_latents(tmp_path):
    assert decode.main(["--dry-run", "latents", "latent_tiles", "--dtype", "float16", "--output", str(tmp_path)]) == 0
    with (tmp_path / "decode-latents.csv").open() as file:
        rows = {(row["label"], row["unit"]): float(row["value"]) for row in csv.DictReader(file)}
    assert {label for label, _ in rows} == {"attnzoo-triton", "copy", "pytorch"}
    case = decode.LatentCase(lengths=(64, 64), dtype=torch.float16)
    for label in ("attnzoo-triton", "copy", "pytorch"):
        assert rows[label, "TB/s"] * rows[label, "us"] == pytest.approx(case.bytes() / 1e6, rel=1e-4)


@pytest.mark.slow
def test_dry_run_of_variants(tmp_path):
    assert decode.main(["--dry-run", "variants", "--dtype", "float16", "--output", str(tmp_path)]) == 0
    with (tmp_path / "decode-variants.csv").open() as file:
        rows = {(row["label"], row["unit"]): row for row in csv.DictReader(file)}
    keys = {label: keys for label, _, keys in decode.variant_layers(512)}
    assert {label for label, _ in rows} == set(keys) and keys["block_sparse 1/4"] == keys["flash, a window of 1/4"] == 128 + 64 + 64
    for label, count in keys.items():
        rate, us = rows[label, "TB/s"], rows[label, "us"]
        assert float(rate["value"]) * float(us["value"]) == pytest.approx(2 * count * 8 * 256 * 2 / 1e6, rel=1e-4)
        assert float(us["ratio"]) == pytest.approx(float(us["value"]) / float(rows["flash", "us"]["value"]), rel=1e-3)


def test_dry_run_fails_when_ours_is_wrong(monkeypatch, capsys):
    backend = Backend("attnzoo-reference", broken(BROKEN["output off by 5 %"]))
    monkeypatch.setitem(peers.BACKENDS, "attnzoo-reference", backend)
    assert flash.main(["--dry-run", "--masks", "causal", "--lengths", "32"]) == 1
    assert "times the allowed error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "sped"], "must be one of speed"),
        (["--dry-run", "--backends", "fa5"], "invalid choice"),
        (["--dry-run", "--lengths", "0"], "must be a positive integer, got '0'"),
        ([], "needs an NVIDIA GPU"),
    ])
def test_command_line_errors(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        flash.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("case", [c for c in cases.CORRECTNESS if max(map(max, c.lengths)) < 300], ids=str)
def test_pairs_and_inputs_of_a_case(case):
    x = case.inputs()
    right = 0 if case.causal else case.window_size[1]
    seen = sum(int(visible(torch.tensor([m]), torch.tensor([n]), m, n, (case.window_size[0], right)).sum()) for m, n in case.lengths)
    diagonal = sum(m for m, n in case.lengths)
    plain_causal = case.causal and case.window_size == (-1, -1) and all(m == n for m, n in case.lengths)
    assert case.pairs() == (seen - diagonal / 2 if plain_causal else seen)
    assert flash_attention(x.q, x.k, x.v, impl="reference", **x.options).shape == x.dout.shape
    assert all(torch.equal(a, b) for a, b in zip(x[:4], case.inputs()[:4], strict=True))
    assert not torch.equal(x.q, case.inputs(seed=1).q)


def test_strided_inputs_are_views_with_nan_behind_each_row():
    x = dataclasses.replace(SMALL, strided=True).inputs()
    for t in x[:4]:
        assert not t.is_contiguous() and t.stride(-1) == 1
        storage = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,))
        assert storage.isnan().sum() == t.numel() // t.shape[-1] * 8
        assert not t.isnan().any()


def test_case_names_are_unique_and_lengths_mixed():
    named = [*cases.CORRECTNESS, *cases.DROPOUT]
    assert len({str(case) for case in named}) == len(named)
    lengths = cases.mixed_lengths(1000, 21)
    assert (max(lengths), sum(lengths)) == (1000, 600 * 21)
    assert list(lengths) != sorted(lengths)
    case = cases.benchmark_case(8192, 128, causal=True)
    assert (case.batch, case.heads, case.flops()) == (2, 16, 4 * 2 * 16 * 8192**2 * 128 / 2)  # 4 B H N^2 D, halved
    assert case.flops(backward=True) == 2.5 * case.flops()



@pytest.mark.slow
def test_two_checkouts_are_compared_cell_by_cell(tmp_path):
    """Dry, and with itself: the same outputs, a ratio for each direction."""
    command = [sys.executable, "-m", "benchmarks.side_by_side", "--other", str(ROOT), "--dry-run", "--rounds", "1", "--output",
               str(tmp_path / "rows.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    assert all(float(row["speed"]) > 0 and row["forward_bits_equal"] == "True" and not row["note"] for row in rows)


@pytest.mark.slow
def test_training_without_a_gpu_is_measured_and_checked(tmp_path, capsys):
    assert cpu.main(["--lengths", "32", "--tokens", "64", "--rounds", "1", "--clock", "cpu", "--output", str(tmp_path / "cpu.csv")]) == 0
    rows = list(csv.DictReader((tmp_path / "cpu.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == [*cpu.VARIANTS] and all(float(row["error"]) <= 1 and row["clock"] == "cpu" for row in rows)
    assert "gpt_tiny, 2x32" in capsys.readouterr().out
