"""Every operator against its peers in one run, `python -m benchmarks.<operator>` from the repository root; docs/performance/ tells how."""
