"""Which kernels the calls of this process took, for the records of runs and benchmarks."""

_taken: dict[str, set[str]] = {}


def note(direction: str, path: str) -> str:
    """Writes down that a call such as "flash backward" took a path such as "gluon"; returns the path."""
    _taken.setdefault(direction, set()).add(path)
    return path


def paths_taken() -> dict[str, list[str]]:
    """The paths of each direction so far, such as {"flash forward": ["gluon"], "flash backward": ["gluon", "triton"]}. Graphs of
    torch.compile count; replays of a CUDA graph took what its capture took."""
    return {direction: sorted(paths) for direction, paths in sorted(_taken.items())}


def forget() -> None:
    _taken.clear()
