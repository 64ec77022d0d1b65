"""The mainloop of attention on CPUs, in plain PyTorch: forward and backward by tiles of queries, in linear memory. It knows no variant."""
