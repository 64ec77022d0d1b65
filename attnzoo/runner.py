"""From a composed config to a run: the only file that knows both Hydra and the Trainer."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from attnzoo import checkpoint, trained
from attnzoo.attention.base import check_path
from attnzoo.errors import UserError
from attnzoo.run import checks, initial
from attnzoo.run.claiming import opens_again
from attnzoo.run.command_line import is_sweep
from attnzoo.run.config import choices, plain
from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder, rank
from attnzoo.run.loggers import build_loggers, close_loggers
from attnzoo.training import report
from attnzoo.training.checkpointing import AtomicCheckpointIO
from attnzoo.training.record import versions

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, float]:
    """One training run as configs/train.yaml describes it; returns the last metrics by name."""
    checks.check_training(cfg)
    folder = RunFolder(Path(cfg.run_dir).absolute())
    if rank() == 0:
        folder.claim(again=opens_again(cfg, folder.path))
    try:
        return _train(cfg, folder)
    finally:
        folder.release()


def _train(cfg: DictConfig, folder: RunFolder) -> dict[str, float]:
    run_dir = folder.path
    report.quiet()
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    torch.set_float32_matmul_precision(cfg.matmul_precision)
    ckpt_path = _checkpoint_to_resume(cfg, run_dir)
    origin = None
    if cfg.init_from is not None:  # what goes on has its weights already, and the description that it began with
        whole = ckpt_path and trained.Trained(str(ckpt_path), "checkpoint", checkpoint.read(ckpt_path))
        origin = whole or trained.read(cfg.init_from, key="init_from")
        cfg = initial.configure(cfg, origin)
        checks.check_training(cfg)
    loggers = build_loggers(cfg, run_dir, "train", resumed=ckpt_path is not None)
    try:
        trainer = _build_trainer(cfg, loggers)
        check_path(cfg.attention.get("impl"), trainer.strategy.root_device)
        data = instantiate(cfg.data, **(initial.data_tokenizer(cfg, origin) if origin else {}), _convert_="all")
        if getattr(data, "packs", False):
            get_class(cfg.attention._target_).check_packed(causal=data.objective == "lm")
        if origin:
            initial.check_tokenizer(cfg, origin, data.tokenizer)
        data.prepare_data()
        data.setup("fit")
        _set_accumulation(trainer, cfg.batch_tokens, data)
        module = _build_module(cfg, data)
        begun = None
        if origin and ckpt_path is None:
            begun = initial.load(module.model, origin, new=cfg.init_new, positions=cfg.init_positions)
            module.record["init"] = {"from": origin.where, "kind": origin.kind, "changed": initial.changes(origin, cfg), **begun}
        elif origin:
            module.record["init"] = origin.record.get("init")
        if trainer.is_global_zero:
            write_whole(folder.config, OmegaConf.to_yaml(OmegaConf.create(plain(cfg))))
            for logger in loggers:
                logger.log_hyperparams(plain(cfg))
            log.info(report.beginning(choices("model", "attention", "data"), trainer, module, data, run_dir))
            if begun:
                log.info(initial.describe(origin, begun, cfg))
        with _ranks_of_this_job(run_dir):
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if ckpt_path is not None and not metrics:
            log.info(f"nothing left to train: {ckpt_path} is at the last step, {trainer.global_step}; raise trainer.max_steps")
        if trainer.is_global_zero and not trainer.fast_dev_run:
            log.info(report.end(run_dir, metrics, run_dir.parent if is_sweep() else None))
        return metrics
    finally:
        close_loggers(loggers)


def evaluate(cfg: DictConfig) -> None:
    """Evaluate checkpoints as configs/eval.yaml describes it; tables and plots go into the run folder."""
    from attnzoo.evaluation import compare
    from attnzoo.evaluation.readings import compose_readings

    checks.check_evaluation(cfg)
    run_dir = Path(cfg.run_dir).absolute()
    folder = RunFolder(run_dir)
    folder.claim(again=True)
    report.quiet()
    loggers: list[Any] = []
    try:
        loggers = build_loggers(cfg, run_dir, "eval")
        compare.run(
            cfg,
            tasks=instantiate(cfg.evaluation.tasks or {}, _convert_="all"),
            build_data=lambda config: instantiate(config, _convert_="all"),
            readings=compose_readings(cfg),
            loggers=loggers,
            folder=run_dir,
        )
        for logger in loggers:
            logger.log_hyperparams(plain(cfg))
        for line in report.unsent(run_dir):
            log.info(line)
    except KeyboardInterrupt:
        log.info(f"interrupted; what was measured is kept, and the same command goes on from there. So far: {run_dir / 'results.csv'}")
        raise
    finally:
        close_loggers(loggers)
        folder.release()


def _checkpoint_to_resume(cfg: DictConfig, run_dir: Path) -> Path | None:
    """With resume=auto the run folder's last checkpoint, if there is one; else ckpt_path."""
    last = RunFolder(run_dir).last
    if cfg.resume == "auto" and last.is_file():
        return last
    if cfg.resume == "auto" and cfg.ckpt_path is None:
        log.info(f"resume=auto: {last} does not exist yet, training starts from the beginning")
    return None if cfg.ckpt_path is None else checkpoint.existing_file(cfg.ckpt_path)


def _build_trainer(cfg: DictConfig, loggers: list[Any]) -> lightning.Trainer:
    callbacks = [instantiate(callback, _convert_="all") for callback in (cfg.callbacks or {}).values() if callback]
    build = instantiate(cfg.trainer, _partial_=True, _convert_="all")
    # where one is switched off Lightning must not bring its own
    enable = {
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
    }
    try:
        trainer = build(callbacks=callbacks, logger=loggers or False, plugins=[AtomicCheckpointIO()], **enable)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if cfg.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            build_of = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise UserError(
                f"trainer.accelerator={cfg.trainer.accelerator}, but PyTorch {torch.__version__} ({build_of}) sees no GPU; "
                "take trainer=cpu or trainer=default, or install a driver and a CUDA build"
            ) from error
        raise UserError(f"trainer: {reason}") from error
    device, precision = trainer.strategy.root_device, str(trainer.precision)
    if device.type == "cuda" and precision.startswith("bf16") and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"trainer.precision={precision}, but {name} has no bfloat16; take trainer.precision=16-mixed")
    return trainer


def _set_accumulation(trainer: lightning.Trainer, batch_tokens: int | None, data: Any) -> None:
    """Micro-batches per optimizer step from the global batch in tokens; intervals count optimizer steps."""
    if batch_tokens is not None:
        micro = data.batch_size * data.seq_len * trainer.world_size
        steps, rest = divmod(batch_tokens, micro)
        if rest or steps < 1:
            parts = f"data.batch_size={data.batch_size} x data.seq_len={data.seq_len} x {trainer.world_size} devices"
            near = micro * max(1, round(batch_tokens / micro))
            raise UserError(f"batch_tokens={batch_tokens} is not a multiple of {micro}, the tokens of a micro-step ({parts}); take {near}")
        trainer.accumulate_grad_batches = steps
    if isinstance(trainer.val_check_interval, int):
        trainer.val_check_interval *= trainer.accumulate_grad_batches


def _build_module(cfg: DictConfig, data: Any) -> lightning.LightningModule:
    needed = data.tokenizer.vocab_size
    vocab_size = cfg.model.vocab_size or needed
    if vocab_size < needed:
        raise UserError(f"model.vocab_size={vocab_size} is smaller than the tokenizer's {needed}; leave it at null or raise it")
    told = plain(cfg)
    config = get_class(cfg.task.module._target_).model_config(told["model"], told["task"], data)
    model = instantiate(config, vocab_size=vocab_size, _convert_="all")
    record = {
        "format": checkpoint.FORMAT,
        "model": {**{key: value for key, value in config.items() if key != "attention"}, "vocab_size": vocab_size},
        "attention": told["attention"],
        "tokenizer": data.tokenizer.record(),
        "task": cfg.task.objective,
        "context": data.seq_len,
        "data": data.record(),
        "versions": versions(),
    }
    return instantiate(cfg.task.module, _partial_=True)(
        model,
        instantiate(cfg.optimizer, _convert_="all"),
        bytes_per_token=data.bytes_per_token("validation"),
        record=record,
        seed=cfg.seed,
        compile=cfg.compile,
        activation_checkpointing=cfg.activation_checkpointing,
    )


@contextlib.contextmanager
def _ranks_of_this_job(run_dir: Path) -> Iterator[None]:
    """Lightning starts the other ranks of a machine by running the command again. In a sweep that must be this job alone, and its process
    group and environment must not reach the next one."""
    if not is_sweep():
        yield
        return
    job = HydraConfig.get()
    sys.argv = [sys.argv[0], *job.overrides.task]
    with read_write(job), open_dict(job):
        job.run.dir = str(run_dir)
    environment = dict(os.environ)
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
