"""AdamW in a launch or two, and matrices that products read in bfloat16 without a cast in each step. Not run on a GPU yet."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from attnzoo_kernels.adamw import AdamWTensors, adamw_


class Copies:
    """Copies in bfloat16 of the matrices of a model's `blocks`, which stand in for them in training steps, and get their gradients.

    With one micro-batch a step these are the gradients of autocast, which makes such copies in each pass and casts their gradients.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        places = [(module, module.weight) for module in model.blocks.modules() if type(module) is nn.Linear]
        # parameters, so that CUDA graphs of torch.compile take them for something that stays where it is
        self._of = {p: nn.Parameter(p.detach().to(torch.bfloat16), p.requires_grad) for _, p in places}
        self._places = [(module._parameters, p, self._of[p]) for module, p in places]
        self._versions = self._seen()

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """The model has the copies in place of its parameters."""
        for parameters, _, copy in self._places:
            parameters["weight"] = copy
        try:
            yield
        finally:
            for parameters, parameter, _ in self._places:
                parameters["weight"] = parameter

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._of.values())

    def _seen(self) -> list[int]:
        return [p._version for p in self._of]

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        return self._of.get(parameter)

    @torch.no_grad()
    def refresh(self) -> None:
        """After others than the optimizer have changed parameters, by loading a checkpoint for one."""
        if (now := self._seen()) != self._versions:
            torch._foreach_copy_(self.tensors, list(self._of))
            self._versions = now

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Where it is: of the copy, if there is one."""
        copy = self.of(parameter)
        return parameter.grad if copy is None else copy.grad

    def gradient_norm(self) -> Tensor:
        """Of all parameters together, float32, ()."""
        found = [gradient for p in self._model.parameters() if (gradient := self.gradient(p)) is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found, 2, dtype=torch.float32)))


def _with_steps_apart(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Each parameter with a step of its own, as torch.optim.AdamW counts them."""
    return {**state_dict, "state": {key: {**own, "step": own["step"].clone()} for key, own in state_dict["state"].items()}}


class OneLaunchAdamW(AdamW):
    """torch.optim.AdamW, whose groups, state and checkpoints it has, on GPUs by `attnzoo_kernels.adamw`.

    copies: their gradients are taken for those of the parameters, and each step writes them anew. scale: float32, (), a factor of the
    gradients in the next step alone, which they do not get themselves.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, copies: Copies | None = None, **adamw: Any):
        super().__init__(groups, fused=True, **adamw)
        self.copies = copies
        self.scale: Tensor | None = None
        self.register_state_dict_post_hook(lambda _, state_dict: _with_steps_apart(state_dict))
        self.register_load_state_dict_post_hook(lambda _: self._share_steps())

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad if self.copies is None else self.copies.gradient(parameter)

    def _share_steps(self) -> None:
        """Steps are counted on the host, by one tensor for all parameters that have made as many."""
        counts: dict[float, Tensor] = {}
        for state in self.state.values():
            step = state["step"].cpu()
            state["step"] = counts.setdefault(float(step), step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for copy in () if self.copies is None else self.copies.tensors:
            copy.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Calls closure, which computes the gradients, and returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, self.scale = self.scale, None
        begun = torch.tensor(0.0)
        launches: dict[tuple, list[nn.Parameter]] = {}
        for n, group in enumerate(self.param_groups):
            for p in group["params"]:
                if (gradient := self._gradient(p)) is None:
                    continue
                if not self.state[p]:
                    self.state[p] = {"step": begun, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                copied = self.copies is not None and self.copies.of(p) is not None
                launches.setdefault((n, gradient.dtype, copied, float(self.state[p]["step"])), []).append(p)
        for count in {id(state["step"]): state["step"] for state in (self.state[p] for ps in launches.values() for p in ps)}.values():
            count += 1
        for (n, _, copied, before), parameters in launches.items():
            group, states = self.param_groups[n], [self.state[p] for p in parameters]
            tensors = AdamWTensors(
                parameters, [self._gradient(p) for p in parameters], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states],
                [self.copies.of(p) for p in parameters] if copied else None)
            adamw_(tensors, step=int(before) + 1, scale=scale, **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")})
        return loss
