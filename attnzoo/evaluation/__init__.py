"""Evaluation of checkpoints: gives one table in long format, its summary and its plots.

A task is a function from model and data to a plan of measurements (`measurement.Plan`), each of which gives rows of the table; a file of
configs/evaluation names it. `run` runs every task on every checkpoint and stores each measurement, so that it can continue after a stop.
"""

from attnzoo.evaluation.compare import run

__all__ = ["run"]
