"""The counterpart of flash-attn's package of the same name."""
