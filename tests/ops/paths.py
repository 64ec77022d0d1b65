"""The implementations that tests go through on this machine."""

import torch

GPU = torch.cuda.is_available()
PATHS = ("triton", "reference") if GPU else ("triton", "cpu", "reference")
