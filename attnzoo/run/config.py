"""A composed config as plain Python, and the options chosen for its groups. No torch here."""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf


def plain(node: DictConfig | None) -> dict[str, Any]:
    """A config as dicts and lists, its interpolations resolved; {} for a group that is null."""
    return {} if node is None else OmegaConf.to_container(node, resolve=True)


def choices(*groups: str) -> list[str]:
    """The options chosen for these config groups; an empty list outside a Hydra application."""
    if not HydraConfig.initialized():
        return []
    chosen = HydraConfig.get().runtime.choices
    return [chosen[group] for group in groups if chosen.get(group)]
