"""flash-attn's folder of the same name."""
