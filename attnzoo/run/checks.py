"""What Lightning and PyTorch would refuse late, or not at all, is refused before anything is built."""

from importlib import import_module
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnzoo.errors import UserError
from attnzoo.signatures import check_options


def check_training(cfg: DictConfig) -> None:
    """Raises UserError or ValueError for a config of train.py that cannot be run."""
    if isinstance(cfg.seed, bool) or not isinstance(cfg.seed, int) or not 0 <= cfg.seed < 2**32:
        raise UserError(f"seed={cfg.seed} must be a whole number from 0 to {2**32 - 1}")
    if cfg.matmul_precision not in ("highest", "high", "medium"):
        raise UserError(f"matmul_precision={cfg.matmul_precision} must be highest, high or medium")
    if cfg.resume not in (None, "auto"):
        raise UserError(f"resume={cfg.resume} must be null or auto; to go on from a file set ckpt_path")
    if isinstance(cfg.batch_tokens, bool) or not isinstance(cfg.batch_tokens, int | None):
        raise UserError(f"batch_tokens={cfg.batch_tokens} must be a whole number, or null for no gradient accumulation")
    every = cfg.activation_checkpointing
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise UserError(f"activation_checkpointing={every} must be a whole number of at least 1 (1: every block), or null")
    if not isinstance(cfg.ckpt_path, str | None):
        raise UserError(f"ckpt_path={cfg.ckpt_path} must be a file, or null")
    if not isinstance(cfg.compile, bool):
        from torch._inductor import list_mode_options  # takes a second to import

        if cfg.compile not in list_mode_options():
            raise UserError(f"compile={cfg.compile} must be false, true, or a mode of torch.compile: {', '.join(list_mode_options())}")
    if "_target_" not in cfg.attention or cfg.attention.get("_partial_") is not True:
        raise UserError("attention: its file must say _target_, the layer's class, and `_partial_: true`, because the model describes each "
                        f"layer to it, got the keys {', '.join(cfg.attention)}")
    for group in ("attention", "model", "optimizer", "trainer"):
        check_target(group, cfg[group])


def check_evaluation(cfg: DictConfig) -> None:
    """The same for a config of eval.py."""
    for name, task in (cfg.evaluation.tasks or {}).items():
        if task:
            check_target(f"evaluation.tasks.{name}", task)
    if not isinstance(cfg.store, str | None):
        raise UserError(f"store={cfg.store} must be a folder, or null")
    if not OmegaConf.is_list(cfg.trust):
        raise UserError(f"trust={cfg.trust} must be a list of modules")


def check_target(where: str, config: DictConfig) -> None:
    """check_options for what will be built. Missing values are for Hydra to ask for, and the size of the vocabulary for the tokenizer."""
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    given = {key: value for key, value in plain.items() if value != "???" and (key, value) != ("vocab_size", None)}
    module, _, name = config._target_.rpartition(".")
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{where}._target_={config._target_} cannot be imported: {error}") from error
    check_options(where, target, given)
