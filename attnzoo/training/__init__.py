"""LightningModules per task, optimizer and schedule, loggers and callbacks."""
