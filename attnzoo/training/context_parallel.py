"""The ranks of a run that read the same sequences together (`trainer.context_parallel`), and the part of a batch that each has."""

from collections.abc import Sequence

import lightning
import torch
from torch.distributed.device_mesh import init_device_mesh

from attnzoo.attention.base import Attention
from attnzoo.batch import IGNORED, Batch
from attnzoo_kernels.context_parallel import ContextParallel
from attnzoo_kernels.context_placement import deal
from attnzoo_kernels.dropout import new_rng_state


class ContextGroup:
    """`trainer.context_parallel` neighbouring ranks. Each rank has its share of the loss; gradients are averaged over all ranks as usual.

    layers: the model's attention layers, whose pairs of queries and keys are divided among the ranks.
    """

    def __init__(self, trainer: lightning.Trainer, layers: Sequence[Attention]):
        self.ranks = ranks = trainer.context_parallel
        mesh = init_device_mesh(trainer.strategy.root_device.type, (trainer.world_size // ranks, ranks), mesh_dim_names=("data", "context"))
        self.group = mesh["context"].get_group()
        self.data_rank = mesh["data"].get_local_rank()  # the rank that one device for these sequences would have
        self.causal = layers[0].spec.causal
        self.has_dropout = layers[0].spec.dropout > 0
        self.dropout: dict[str, torch.Tensor] = {}
        self.windows = [layer.keys_before if self.causal else -1 for layer in layers]

    def draw_dropout(self, seed: int, device: torch.device) -> None:
        """Draws the seeds of the layers' attention dropout. If nothing else is dropped, one device draws the same ones and has the same
        masks."""
        if self.has_dropout:
            generator = torch.Generator(device).manual_seed(seed)
            self.dropout = {"dropout_states": torch.stack([new_rng_state(device, generator) for _ in self.windows])}

    def own(self, batch: Batch, lengths: Sequence[int] | None) -> Batch:
        """This rank's part of a batch that all ranks of the group have. Labels are already aligned with the tokens that predict them.

        lengths: of the sequences, where the host knows them. Chunks of packed sequences are then distributed to balance the work.
        """
        total, dealt = batch["input_ids"].shape[-1], {}
        if "cu_seqlens" in batch and lengths is not None:
            owned = deal(total, lengths, self.ranks, causal=self.causal, windows=self.windows)
            dealt = {"owned": owned, "documents": lengths}
        plan = ContextParallel(total, self.group, **dealt)
        # the labels alone show which logits count: elsewhere they are IGNORED
        own: Batch = {name: value for name, value in batch.items() if name != "logits_at"} | {"context": plan} | self.dropout
        for name, fill in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 0), ("token_type_ids", 0)):
            if isinstance(own.get(name), torch.Tensor):
                own[name] = plan.shard(own[name], -1, fill)
        return own
