"""The LightningModule that all tasks share: the loss over targets, the training step and the metrics."""

import logging
import math
from collections.abc import Callable
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.aggregation import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from attnzoo.batch import IGNORED, Batch, Inputs, sharing
from attnzoo.checkpoint import check_same_model
from attnzoo.run.steps import is_log_step
from attnzoo.training.optimizer import numbers, put_back

log = logging.getLogger(__name__)

INPUTS = tuple(Inputs.__annotations__)
READ = {"input_ids", "labels", "weights", *INPUTS}
MANY_SIZES = 10  # the run warns when it has recorded CUDA graphs for so many sizes of batches


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """logits (n, classes), float32 (float64 for a float64 model), and targets int64 (n,), -100 where there is no target."""
    logits = model(batch["input_ids"], **_inputs(batch))
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32)), _targets(batch)


def summed_loss(model: nn.Module, batch: Batch, fused: bool = False) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats summed over a batch's targets, and the number of targets, both (), at least float32. Weights multiply
    both a target's loss and its count. fused: the logits are never in memory all at once. The layers' own losses
    (`Transformer.extra_loss`) contribute to the gradient but not to the value."""
    if not fused:
        loss, count = cross_entropy(*predict(model, batch), batch.get("weights"))
    else:
        targets, weights = _targets(batch), batch.get("weights")
        weighted = {} if weights is None else {"target_weights": weights}
        loss, count = _counted(model(batch["input_ids"], targets=targets, **weighted, **_inputs(batch)), targets, weights)
    take = getattr(model, "take_extra_loss", None) if model.training else None  # a model that is not attnzoo's has none
    extra = None if take is None else take()
    return (loss if extra is None else loss + (extra - extra.detach())), count


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`summed_loss` without the extra loss, from the result of `predict`."""
    if weights is None:
        return _counted(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"), targets)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return _counted((losses * weights).sum(), targets, weights)  # not losses @ weights, which autocast would compute in 16 bits


def _counted(loss: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    counted = targets != IGNORED
    return loss, (counted if weights is None else torch.where(counted, weights, 0)).sum().to(loss.dtype)


def _inputs(batch: Batch) -> Inputs:
    return {name: batch[name] for name in INPUTS if name in batch}


def _targets(batch: Batch) -> Tensor:
    targets = batch["labels"].flatten()
    return targets[batch["logits_at"]] if "logits_at" in batch and "weights" not in batch else targets


class TokenPrediction(lightning.LightningModule):
    """Trains a model to predict `labels`. Losses are means over all targets of an optimizer step, however they are split into batches.

    model: called as model(input_ids, **inputs) -> logits (..., vocab_size), or (n, vocab_size) with `logits_at`.
    optimizer: `.build(module, total_steps=...)` returns the optimizer and its schedule, see attnzoo.training.optimizer.
    bytes_per_token: mean bytes of text per predicted validation token; None where that has no meaning.
    record: what a checkpoint must contain to be loaded, in plain JSON types (attnzoo.checkpoint).
    seed: of dropout. compile: torch.compile for model and loss together, in training; a string is its mode.
    activation_checkpointing: with k, every k-th block keeps only its input, and the backward recomputes the rest (Chen et al. 2016,
        arXiv:1604.06174); None keeps all.
    fused_loss: output layer and loss of a training step are one operator (`attnzoo_kernels.linear_cross_entropy`). None: only on a GPU, for
        models with an output per token, and not in float64; with torch.compile only where logits are computed for all tokens.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, *, bytes_per_token: float | None, record: dict, seed: int, compile: bool | str = False,
        activation_checkpointing: int | None = None, fused_loss: bool | None = None,
    ):
        super().__init__()
        self.model = model
        self.model.recompute_every = activation_checkpointing
        if fused_loss and not self.predicts_tokens:
            raise ValueError("fused_loss=True: must be null or false for a task that predicts no tokens")
        self.fused_loss = fused_loss if self.predicts_tokens else False
        self.compiled = bool(compile)
        self.optimizer = optimizer
        self.bytes_per_token = bytes_per_token
        self.record = record
        self.seed = seed
        # these are read before any sharding; `matrices` are the names for weight decay, `shapes` those of a checkpoint's tensors
        self.n_parameters = model.n_parameters
        self.matrices = {name for name, parameter in self.named_parameters() if parameter.ndim >= 2}
        self.shapes = {name: value.shape for name, value in self.state_dict().items()}
        self._training_loss: Callable = summed_loss
        self.uses_graphs = False  # whether torch.compile makes CUDA graphs
        self._sizes: set[torch.Size] = set()  # of the batches that these graphs read
        if compile:
            # recomputation in the backward must not repeat what the forward stores for later blocks (SequenceInfo.once)
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            self._training_loss = torch.compile(summed_loss) if compile is True else torch.compile(summed_loss, mode=compile)
            if compile is not True:
                from torch._inductor import list_mode_options  # takes a second to import

                self.uses_graphs = list_mode_options(compile).get("triton.cudagraphs", False)
        # sums, because MeanMetric ignores its weights with this nan_strategy (torchmetrics 1.9)
        self._validation_loss, self._validation_count = SumMetric(nan_strategy="disable"), SumMetric(nan_strategy="disable")
        self._accuracy = MulticlassAccuracy(self.n_classes, average="micro", ignore_index=IGNORED, validate_args=False)
        self._totals: Tensor | None = None
        self._begins_step = True  # whether this micro-batch is the first of its optimizer step
        self.context: Any = None  # the ContextGroup of this rank, where several read one sequence
        self.step_loss: Tensor | None = None  # (), of the last optimizer step, summed over its targets
        self._lr: float | None = None  # of the last optimizer step; the schedule has moved on since

    predicts_tokens = True  # the model has one output, from its output layer, for each target

    @property
    def n_classes(self) -> int:
        """The number of classes that the model decides between."""
        return self.model.vocab_size

    @property
    def sample_length(self) -> int:
        """The number of a validation document's first tokens of which `sample` makes a sample."""
        return self.model.train_context

    @staticmethod
    def model_config(model: dict[str, Any], task: dict[str, Any], data: Any) -> dict[str, Any]:
        """The configuration of the model to train; a task may ask for another head. model, task: as configured. data: the data module."""
        return model

    def setup(self, stage: str) -> None:
        if self.context is not None or sharing(self.trainer) == 1:
            return
        from attnzoo.training.context_parallel import ContextGroup  # fails with a PyTorch that is built without torch.distributed

        layers = [block.attention for block in self.model.blocks]
        for layer in layers:
            layer.check_context_parallel(packed=getattr(self.trainer.datamodule, "packs", False))
        self.context = ContextGroup(self.trainer, layers)

    def _read(self, batch: Batch) -> Batch:
        # other entries of a batch (counts, lengths) change from step to step and would make torch.compile recompile
        read: Batch = {name: value for name, value in batch.items() if name in READ}
        return read if self.context is None else self.context.own(read, batch.get("lengths"))

    # With S(x) the sum of x over micro-batches and ranks, the gradient must be that of S(loss) / S(count). Without accumulation S(count) is
    # known before the backward pass. With it, S(count) is known only at the last micro-batch, and the gradients are scaled then.

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.uses_graphs and len(self._sizes) < MANY_SIZES:
            self._sizes.add(batch["input_ids"].shape)
            if len(self._sizes) == MANY_SIZES:
                log.warning(f"compile records a CUDA graph for each size of a batch, and {MANY_SIZES} sizes were seen: set "
                            "data.batching=balanced, which fills packed batches up to one size, or compile=true")
        loss, count = self._training_loss(self.model, self._read(batch), self._fuses(batch))
        totals = torch.stack([loss.detach(), count])
        self._begins_step = self._totals is None
        self._totals = totals if self._totals is None else self._totals + totals
        if self.trainer.accumulate_grad_batches > 1:
            return loss
        self._sum_over_ranks(self._totals)
        # the strategies average gradients over the ranks
        return loss * self.trainer.world_size / self._totals[1].clamp(min=1)

    def on_after_backward(self) -> None:
        # The first micro-batch's gradients are in memory of its CUDA graph, and the next replay would overwrite them.
        if self.uses_graphs and self._begins_step and self.trainer.accumulate_grad_batches > 1 and not self.is_sharded:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _fuses(self, batch: Batch) -> bool:
        """Whether output layer and loss are one operator for this batch."""
        if self.fused_loss is not None:
            return self.fused_loss
        # with logits_at there are few logits, which need little memory, and Inductor's kernels are as fast as the operator
        return self.device.type == "cuda" and self.dtype != torch.float64 and not (self.compiled and "logits_at" in batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        totals, self._totals = self._totals, None
        if (n_micro_batches := self.trainer.accumulate_grad_batches) > 1:
            self._sum_over_ranks(totals)
            # Lightning averaged over the micro-batches, the strategy over the ranks
            scale = n_micro_batches * self.trainer.world_size / totals[1].clamp(min=1)
            torch._foreach_mul_([p.grad for p in self.parameters() if p.grad is not None], scale)
        self.step_loss, self._lr = totals[0], optimizer.param_groups[0]["lr"]
        self.log("train/loss", totals[0] / totals[1])

    def configure_model(self) -> None:
        if hasattr(self.trainer.strategy, "shard") and not self.is_sharded:
            self.trainer.strategy.shard(self.model)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the parameters only (FSDP)."""
        return hasattr(self.trainer.model, "clip_grad_norm_") or hasattr(next(self.parameters()), "full_tensor")

    def _sum_over_ranks(self, totals: Tensor) -> None:
        # not Strategy.reduce, whose barrier makes the host wait in every step
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(totals)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Dropout depends only on the seed, the step, the micro-batch and the rank, so that a resumed run repeats it.
        seed = self._seed_of(batch_idx, self.global_rank)
        # not torch.manual_seed, which seeds all device types and stores a formatted stack trace for each that is absent
        torch.default_generator.manual_seed(seed)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(seed)
        if self.context is not None:
            self.context.draw_dropout(self._seed_of(batch_idx, self.context.data_rank), self.device)

    def _seed_of(self, batch_idx: int, rank: int) -> int:
        return int(np.random.SeedSequence([self.seed, self.global_step, batch_idx, rank]).generate_state(1, np.uint64)[0])

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if is_log_step(self.trainer):
            self.log_dict({"train/lr": self._lr, **self.model.metrics()})

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ):
        if not gradient_clip_val:
            return
        if hasattr(self.trainer.model, "clip_grad_norm_"):  # FSDP: no rank has the whole gradient
            norm = self.trainer.model.clip_grad_norm_(gradient_clip_val)
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        self.log("train/grad_norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer, schedule = self.optimizer.build(
            self.named_parameters(),
            matrices=self.matrices,
            total_steps=lambda: self.trainer.estimated_stepping_batches,
            scaled_gradients=getattr(self.trainer.precision_plugin, "scaler", None) is not None,
        )
        self._given_numbers = numbers(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        (optimizer,), (config,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        if self.trainer.ckpt_path is None or not isinstance(config.scheduler, LambdaLR):  # a user's own recipe may have another schedule
            return
        # the restored state holds the numbers of the earlier command, and this command's shall apply
        for name, (new, old) in put_back(optimizer, config.scheduler, self._given_numbers).items():
            log.info(f"optimizer.{name}={new} from here on, it was {old}")

    def on_validation_epoch_start(self) -> None:
        for metric in (self._validation_loss, self._validation_count):
            if self.device.type != "mps":  # mps has no float64
                metric.set_dtype(torch.float64)
            metric.reset()
        self._accuracy.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, targets = predict(self.model, self._read(batch))
        loss, count = cross_entropy(logits, targets, batch.get("weights"))
        self._validation_loss.update(loss)
        self._validation_count.update(count)
        self._accuracy.update(logits.argmax(-1), targets)

    def on_validation_epoch_end(self) -> None:
        loss = self._validation_loss.compute() / self._validation_count.compute()
        self.log_dict(self.validation_metrics(loss, self._accuracy.compute()), sync_dist=True)

    def validation_metrics(self, loss: Tensor, accuracy: Tensor) -> dict[str, Tensor]:
        """The metrics to log after validation. loss: nats per target. accuracy: the share of targets that the likeliest class equals."""
        metrics = {"val/loss": loss, "val/ppl": loss.exp(), "val/accuracy": accuracy}
        if self.bytes_per_token is not None:
            metrics["val/bpb"] = loss / math.log(2) / self.bytes_per_token
        return metrics

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["attnzoo"] = self.record

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_same_model(checkpoint, self.shapes, self.record)
