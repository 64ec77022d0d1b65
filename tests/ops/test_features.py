"""DESIGN.md's table of what each operator takes by each implementation is what the code says. A failure prints the table that is right."""

import importlib
from pathlib import Path

import pytest
import torch

from attnzoo_kernels import (
    block_sparse_attention,
    decode_attention,
    differential_attention,
    dispatch,
    distance_bias_attention,
    dual_chunk_attention,
    flash_attention,
    forgetting_attention,
    moba_attention,
    msa_attention,
    nsa_attention,
    sigmoid_attention,
    two_frame_attention,
)
from attnzoo_kernels.block_sparse.patterns import dense

LENGTH = 64
OPERATORS = {"flash": flash_attention, "block_sparse": block_sparse_attention, "differential": differential_attention,
             "dual_chunk": dual_chunk_attention, "sigmoid": sigmoid_attention, "forgetting": forgetting_attention,
             "distance_bias": distance_bias_attention, "moba": moba_attention, "msa": msa_attention, "nsa": nsa_attention,
             "two_frame": two_frame_attention, "decode": decode_attention}
HALF = {"dtype": torch.bfloat16}
# what a call changes: dtype, widths, heads and options
FEATURES = {
    "16 bits": {},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "head dim 32": {"head_dim": 32, "value_dim": 32},
    "head dim 256": {"head_dim": 256, "value_dim": 64},
    "values of 16 columns": {"value_dim": 16},
    "fewer key heads": {"kv_heads": 1},
    "both directions": {"causal": False},
    "a window": {"window_size": (9, 0)},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"alibi_slopes": torch.ones(2)},
    "sinks": {"sinks": torch.zeros(2)},
    "dropout": {"dropout_p": 0.1},
    "a scale below 0": {"softmax_scale": -1.0},
    "packed sequences": {"packed": True},
    "key ranges": {"packed": True, "ranges": True, "causal": False},
    "gradients": {"requires_grad": True},
}


def made(operator: str, dtype=torch.bfloat16, head_dim=64, value_dim=64, kv_heads=2, packed=False, requires_grad=False, causal=True,
         **options):
    """Arguments of a small call."""
    def tensor(heads, width):
        x = torch.zeros(1, LENGTH, heads, width, dtype=dtype)
        return (x[0] if packed else x).requires_grad_(requires_grad)

    q, k, v = tensor(2, head_dim), tensor(kv_heads, head_dim), tensor(kv_heads, value_dim)
    options["causal"] = causal
    if "ranges" in options:
        options = {"ranges": torch.tensor([[0, LENGTH, 0, LENGTH, 1]], dtype=torch.int32)}
    elif packed:
        bounds = torch.tensor([0, 9, LENGTH], dtype=torch.int32)
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        options |= {"max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH} if operator == "block_sparse" else {}
    if operator in ("forgetting", "moba", "msa", "nsa", "two_frame") and causal:
        del options["causal"]
    table = torch.ones(LENGTH, 8)
    return {
        "flash": ((q, k, v), options),
        "block_sparse": ((q, k, v, dense(LENGTH, block=64)), options),
        "differential": ((q, q, k, None, v, torch.tensor(0.5)), options),
        "dual_chunk": ((q, k, v), options | {"cos": table, "sin": table, "chunk_size": 48, "local_size": 16}),
        "sigmoid": ((q, k, v), options),
        "forgetting": ((q, k, v, torch.zeros(q.shape[:-1])), options),
        "distance_bias": ((q, k, v, torch.zeros(2, 9)), options),
        "moba": ((q, k, v), options | {"block_size": 16, "top_k": 2}),
        "msa": ((q, k, v, k, k[..., :1, :]), options | {"block_size": 16, "top_k": 2}),
        "nsa": ((q, k, v, *(x[..., :4, :, :] for x in (k, v)), torch.ones(*q.shape[:-1], 3, dtype=dtype)),
                options | {"compress_size": 16, "block_size": 16, "block_count": 2}),
        "two_frame": ((torch.stack((q, q), -2), torch.stack((k, k), -2), v), options | {"near_keys": 64}),
        "decode": ((q[:, :1], k, v), options | {"cache_seqlens": torch.full((1,), LENGTH, dtype=torch.int32)}),
    }[operator]


def takes(operator: str, impl: str, feature: str) -> bool:
    """Whether an implementation takes a call, on a Hopper GPU where it is a kernel."""
    inputs, options = made(operator, **FEATURES[feature])
    try:
        if impl != "reference":
            return dispatch.why_not(impl, OPERATORS[operator], *inputs, **options) is None
        OPERATORS[operator](*inputs, **options, impl=impl)
    except TypeError as error:
        assert "unexpected keyword argument" in str(error), error
        return False
    return True


@pytest.fixture
def hopper(monkeypatch):
    """Tensors on a CPU pass for such on a Hopper GPU, as far as predicates look."""
    monkeypatch.setattr(dispatch, "gluon_loads", lambda: True)
    monkeypatch.setattr(dispatch, "takes_reference", as_on_a_gpu(dispatch.takes_reference))
    for operator in ("flash", "block_sparse", "differential", "dual_chunk", "sigmoid", "two_frame"):
        module = importlib.import_module(f"attnzoo_kernels.{operator}.hopper")
        monkeypatch.setattr(module, "why_not_tma", lambda x, *_: None if x.element_size() == 2 else "16 bits only")


def as_on_a_gpu(takes_reference):
    def stand_in(operator, impl, name, x, choices=dispatch.IMPLEMENTATIONS, **options):
        if impl not in choices:
            raise NotImplementedError(f"{operator} has no {impl}")
        return takes_reference(operator, "triton" if impl == "gluon" else impl, name, x, choices, **options)

    return stand_in


def table() -> str:
    def cell(operator, feature):
        return " ".join(impl[0].upper() for impl in dispatch.IMPLEMENTATIONS if takes(operator, impl, feature)) or "-"

    rows = [("", *OPERATORS), ("---",) * (len(OPERATORS) + 1)]
    rows += [(feature, *(cell(operator, feature) for operator in OPERATORS)) for feature in FEATURES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CPU tensors in the interpreter's mode")
def test_the_table_of_features_is_true(hopper):
    written, true = (Path(__file__).parents[2] / "DESIGN.md").read_text(), table()
    assert true in written, f"DESIGN.md: its table of features must be\n{true}"
