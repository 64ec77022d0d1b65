"""Pieces that the kernels of all variants are made of. They know no variant."""
