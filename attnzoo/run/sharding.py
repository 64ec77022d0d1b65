"""A strategy that shards parameters, gradients and optimizer states over the ranks by PyTorch's `fully_shard` (FSDP2)."""

import warnings
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FullyShardStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy over all ranks, on any device. A checkpoint is one file in the format of a run on one device, and
    each kind of run can resume from the other's file.

    options: of `ModelParallelStrategy`, except the sizes of its mesh.
    """

    def __init__(self, **options: Any):
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, **options)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def shard(self, model: nn.Module) -> None:
        """Shards each of the model's `blocks`, and then the rest of the model."""
        # this warning does not apply, because losses do not modify the model's outputs in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    # Lightning's strategy numbers the parameters of a saved optimizer in the module's order. These methods number them in the order of the
    # optimizer's groups, as the file of a run on one device does.

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        whole = get_optimizer_state_dict(self.model, optimizer, options=WHOLE)
        if not self.is_global_zero:
            return {}
        numbers = {name: number for number, name in enumerate(_names(whole))}
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in whole["param_groups"]]
        return {"state": {numbers[name]: state for name, state in whole["state"].items()}, "param_groups": groups}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        content = self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path))
        self.lightning_module.on_load_checkpoint(content)  # before the weights are loaded, because it may reject them
        set_model_state_dict(self.model, content["state_dict"], options=WHOLE)
        for optimizer, saved in zip(self.optimizers, content["optimizer_states"], strict=True):
            names = _names(get_optimizer_state_dict(self.model, optimizer))
            groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
            state = {names[number]: values for number, values in saved["state"].items()}
            set_optimizer_state_dict(self.model, optimizer, {"state": state, "param_groups": groups}, options=WHOLE)
        return content


def _names(optimizer_state: dict[str, Any]) -> list[str]:
    """The names of an optimizer's parameters, group by group."""
    return [name for group in optimizer_state["param_groups"] for name in group["params"]]
