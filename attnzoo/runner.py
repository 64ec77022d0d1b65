"""From a composed config to a run: the only file that knows both Hydra and the Trainer."""

import contextlib
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.utils import get_class, instantiate
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import DictConfig, OmegaConf

from attnzoo import checkpoint, fp8, trained
from attnzoo import layers as by_layer
from attnzoo.attention.supports import check_path
from attnzoo.batch import sharing
from attnzoo.errors import UserError
from attnzoo.run import checks, initial, values
from attnzoo.run.claiming import opens_again, own_folder
from attnzoo.run.command_line import is_sweep
from attnzoo.run.config import choices, plain
from attnzoo.run.files import write_whole
from attnzoo.run.folder import RunFolder, rank
from attnzoo.run.loggers import build_loggers, close_loggers
from attnzoo.run.ranks import check_alike
from attnzoo.run.resuming import checkpoint_to_resume
from attnzoo.run.trainer import fit, make_trainer, set_accumulation
from attnzoo.training import report
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
    ckpt_path = checkpoint_to_resume(cfg.resume, cfg.ckpt_path, folder)
    origin = None
    if cfg.init_from is not None:
        # a run that resumes has its weights in its own checkpoint, with the model that it was begun with
        resumed = ckpt_path and trained.Trained(str(ckpt_path), "checkpoint", checkpoint.read(ckpt_path))
        origin = resumed or trained.read(cfg.init_from, key="init_from")
        cfg = initial.configure(cfg, origin)
        checks.check_training(cfg)
    values.warn(cfg)
    loggers = build_loggers(cfg, run_dir, "train", resumed=ckpt_path is not None)
    try:
        trainer = build_trainer(cfg, loggers)
        attentions = [own["attention"] for own in by_layer.by_kind(plain(cfg.model), plain(cfg.attention)).values()]
        for attention in attentions:
            check_path(attention.get("impl"), trainer.strategy.root_device)
        data = instantiate(cfg.data, **(initial.data_tokenizer(cfg, origin) if origin else {}), _convert_="all")
        trees = getattr(data, "trees", False)
        if getattr(data, "packs", False):
            for attention in attentions:
                get_class(attention["_target_"]).check_packed(causal=data.objective == "lm", trees=trees)
        _check_model(cfg, trainer, data, trees, origin if ckpt_path is None else None)
        if origin:
            initial.check_tokenizer(cfg, origin, data.tokenizer)
        _check_vocabulary(cfg.model.vocab_size, data.tokenizer.vocab_size)
        set_accumulation(trainer, cfg.batch_tokens, data)
        data.prepare_data()
        data.setup("fit")
        module = _build_module(cfg, data)
        checks.check_monitors(cfg, module)
        if trainer.precision == "fp8":  # Lightning would convert the model too late for the record
            module.record["fp8"] = fp8.convert(module.model)
        loaded = None
        if origin and ckpt_path is None:
            loaded = initial.load(module.model, origin, new=cfg.init_new, positions=cfg.init_positions)
            module.record["init"] = {"from": origin.where, "kind": origin.kind, "changed": initial.changes(origin, cfg), **loaded}
        elif origin:
            module.record["init"] = origin.record.get("init")
        if trainer.world_size > 1:
            trainer.callbacks.append(LambdaCallback(setup=lambda *_, stage: check_alike(plain(cfg), module.record)))
        if trainer.is_global_zero and not trainer.fast_dev_run:  # its folder is not a run, or it is that of another run
            if ckpt_path is None:
                _keep_config(cfg, folder, loggers)
            else:  # not before the checkpoint is known to fit: a command that is refused must change nothing
                trainer.callbacks.append(LambdaCallback(on_train_start=lambda *_: _keep_config(cfg, folder, loggers)))
        if trainer.is_global_zero:
            chosen = choices("model", "attention", "layers") if origin is None else initial.names(module.model, module.record)
            log.info(report.beginning([*chosen, *choices("data")], trainer, module, data, run_dir))
            if loaded:
                log.info(initial.describe(origin, loaded, cfg))
        fit(trainer, module, data, ckpt_path, run_dir, requeue=cfg.resume == "auto")
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if not metrics:
            log.info(report.nothing_trained(trainer, ckpt_path))
        if trainer.is_global_zero and not trainer.fast_dev_run:
            log.info(report.end(run_dir, metrics, run_dir.parent if is_sweep() else None))
        return metrics
    finally:
        close_loggers(loggers)


def evaluate(cfg: DictConfig) -> None:
    """Evaluate checkpoints as configs/eval.yaml describes it; tables and plots go into the run folder."""
    from attnzoo.evaluation import compare, parts, together
    from attnzoo.evaluation.readings import compose_readings

    checks.check_evaluation(cfg)
    parts.check(cfg)
    readings = compose_readings(cfg)
    run_dir = Path(cfg.run_dir if rank() == 0 else own_folder()).absolute()
    folder = RunFolder(run_dir)
    folder.claim(again=True)
    report.quiet()
    loggers: list[Any] = []
    try:
        may_differ = ("run_dir", "ckpt_path", "runs", "store", "logger")  # between the processes
        together.begin(cfg.accelerator, {name: value for name, value in plain(cfg).items() if name not in may_differ})
        loggers = build_loggers(cfg, run_dir, "eval") if together.is_first() else []
        if cfg.devices > 1:
            parts.measure(cfg)
            cfg = OmegaConf.merge(cfg, {"remeasure": False})  # the processes have measured everything
        compare.run(
            cfg,
            tasks=instantiate(cfg.evaluation.tasks or {}, _convert_="all"),
            build_data=lambda config: instantiate(config, _convert_="all"),
            readings=readings,
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
        together.end()


def build_trainer(cfg: DictConfig, loggers: list[Any]) -> lightning.Trainer:
    """The Trainer of a train.py config."""
    callbacks = [instantiate(callback, _convert_="all") for callback in (cfg.get("callbacks") or {}).values() if callback]
    return make_trainer(instantiate(cfg.trainer, _partial_=True, _convert_="all"), callbacks, loggers, cfg.trainer.accelerator)


def _keep_config(cfg: DictConfig, folder: RunFolder, loggers: list[Any]) -> None:
    write_whole(folder.config, OmegaConf.to_yaml(OmegaConf.create(plain(cfg))))
    for logger in loggers:
        logger.log_hyperparams(plain(cfg))


def _check_model(cfg: DictConfig, trainer: lightning.Trainer, data: Any, trees: bool, origin: trained.Trained | None) -> None:
    """Raises ValueError or UserError for inputs that a layer does not support, and for initial weights that do not fit. It builds the model
    on the meta device, before the data are prepared, which may take hours."""
    # a user's own layer may not work on the meta device; warnings are shown when the model is built for training
    with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"), torch.device("meta"):
        model = instantiate(cfg.model, _partial_=True, _convert_="all")(vocab_size=cfg.model.vocab_size or 1)
        for block in model.blocks:
            if trees:
                block.attention.check_trees()
            if sharing(trainer) > 1:
                block.attention.check_context_parallel(packed=getattr(data, "packs", False))
        if origin:
            initial.check_shapes(model, origin, new=cfg.init_new, positions=cfg.init_positions)


def _check_vocabulary(size: int | None, needed: int) -> None:
    if size is not None and size < needed:
        raise UserError(f"model.vocab_size={size} is smaller than the tokenizer's {needed}; leave it at null or raise it")


def _build_module(cfg: DictConfig, data: Any) -> lightning.LightningModule:
    vocab_size = cfg.model.vocab_size or data.tokenizer.vocab_size
    settings = plain(cfg)
    config = get_class(cfg.task.module._target_).model_config(settings["model"], settings["task"], data)
    model = instantiate(config, vocab_size=vocab_size, _convert_="all")
    record = {
        "format": checkpoint.FORMAT,
        "model": {**{key: value for key, value in config.items() if key != "attention"}, "vocab_size": vocab_size},
        "attention": settings["attention"],
        "tokenizer": data.tokenizer.record(),
        "task": cfg.task.objective,
        "optimizer": cfg.optimizer._target_,
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
        fused_loss=cfg.fused_loss,
    )
