"""What kernels have no derivative for is refused by name, never given as zeros or without a graph."""

import pytest
import torch
from test_dispatch import OPERATORS, call, function
from torch.autograd import forward_ad

from attnzoo_kernels import differential_attention, moba_blocks, padding

DIFFERENTIABLE = ("flash", "block_sparse", "differential", "dual_chunk", "sigmoid", "forgetting", "distance_bias", "moba", "msa", "nsa",
                  "two_frame", "bias_gelu")


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_a_gradient_penalty_is_refused(operator, device):
    """Its gradients would have no graph, and the penalty none of its own."""
    out = call(operator, device, "triton")
    with pytest.raises(NotImplementedError, match='no second derivative, which create_graph=True asks for .*impl="reference" has'):
        torch.autograd.grad(out.sum(), [x for x in leaves(out) if x.requires_grad], create_graph=True)


def leaves(out: torch.Tensor) -> set[torch.Tensor]:
    """What a result was made of."""
    found, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        found |= {node.variable} if hasattr(node, "variable") else set()
        nodes += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return found


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_the_reference_takes_a_gradient_penalty(operator, device):
    out = call(operator, device, "reference")
    grads = torch.autograd.grad(out.square().sum(), list(leaves(out)), create_graph=True)
    assert any(g.requires_grad for g in grads)


def test_the_end_of_an_encoder_has_no_second_derivative(device):
    hidden, residual = (torch.randn(2, 4, device=device, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(2, 4, device=device)
    out = padding.add_norm_pad_input(hidden, residual, weight, bias, torch.tensor([0, 2], device=device), 1, 3, impl="triton")
    with pytest.raises(NotImplementedError, match="add_norm_pad_input: the kernels have no second derivative"):
        torch.autograd.grad(out.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("operator", (*OPERATORS, "moba", "msa", "nsa"))
@pytest.mark.parametrize("through", ("dual", "func"))
def test_forward_mode_is_refused(operator, through, device):
    """Its tangents would be zeros, or none at all."""
    run, q = function(operator, device, "triton")
    with pytest.raises(NotImplementedError, match="forward-mode"):
        if through == "func":
            torch.func.jvp(run, (q,), (torch.ones_like(q),))
        else:
            with forward_ad.dual_level():
                run(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_vmap_is_refused(operator, device):
    run, q = function(operator, device, "triton")
    with pytest.raises(NotImplementedError, match="torch.func.*vmap; impl=.reference. (has|does)"):
        torch.func.vmap(run)(q[None])


@pytest.mark.parametrize("transform", (torch.func.vmap, lambda run: torch.func.grad(lambda q: run(q).sum())))
def test_a_kernel_without_a_derivative_takes_no_wrapped_tensors(transform, device):
    k = torch.randn(1, 5, 1, 16, device=device)
    with pytest.raises(NotImplementedError, match="moba_blocks: the kernel takes no tensors of torch.func.grad, jvp or vmap"):
        transform(lambda q: moba_blocks(q, k, block_size=2, top_k=2, impl="triton").float())(k[None] if transform is torch.func.vmap else k)


def test_functional_gradients_are_refused(device):
    q, k, v = torch.randn(3, 1, 5, 1, 16, device=device)
    lam = torch.tensor(0.5, device=device)
    with pytest.raises(NotImplementedError, match="create_graph=True asks for .so does torch.func.grad."):
        torch.func.grad(lambda q: differential_attention(q, q, k, None, v, lam, impl="triton").sum())(q)
