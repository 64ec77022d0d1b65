"""Evaluation: checkpoints in; one long-format table, its summary and its plots out.

A task is a function from model and data to rows (`perplexity.by_length`, `validation.validation_loss`), named by a file of
configs/evaluation; `run` puts every task to every checkpoint.
"""

from attnzoo.evaluation.compare import run

__all__ = ["run"]
