"""Every operator against its peers in one run: `python -m benchmarks.<operator>` from the repository root (NOTES.md: how)."""
