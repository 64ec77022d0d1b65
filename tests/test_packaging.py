"""What is importable and what imports what: the kernels stand alone, and nothing named `kernels` is ours."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels" / "attnzoo_kernels"


def imported(path: Path) -> set[str]:
    """Modules that a file imports, at the top or anywhere below."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def run(code: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT / "kernels")}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS)))
def test_kernels_import_torch_and_triton_only(path):
    foreign = {name.partition(".")[0] for name in imported(path)} - set(sys.stdlib_module_names) - {"attnzoo_kernels", "torch", "triton"}
    if path.name == "layout.py":  # BlockLayout.plot draws, at the point of use
        foreign -= {"matplotlib"}
    assert not foreign


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("forward.py")), ids=lambda path: path.parent.name)
def test_kernels_do_not_import_their_reference(path):
    assert not {name for name in imported(path) if name.endswith("reference")}


def test_only_the_runner_knows_hydra_and_the_trainer():
    knows = [path.name for path in (ROOT / "attnzoo").rglob("*.py")
             if {"hydra", "lightning"} <= {name.partition(".")[0] for name in imported(path)}]
    assert knows == ["runner.py"]


def test_kernels_import_without_triton_and_lightning(tmp_path):
    code = """
import sys
for name in ("triton", "lightning", "hydra", "wandb", "datasets"):
    sys.modules[name] = None
import attnzoo_kernels, torch
q = torch.randn(1, 5, 2, 16)
print(attnzoo_kernels.flash_attention(q, q, q, causal=True).shape)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0 and "torch.Size([1, 5, 2, 16])" in done.stdout, done.stderr


def test_nothing_named_kernels_is_ours(tmp_path):
    done = run("import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)", tmp_path)
    assert "attnzoo" not in done.stdout, done.stdout


@pytest.mark.slow
def test_a_wheel_has_the_commands_and_the_configs(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "kernels", source / "kernels", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("attnzoo", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source], check=True)
    site, empty = tmp_path / "site", tmp_path / "empty"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, *tmp_path.glob("*.whl")], check=True)
    empty.mkdir()

    def command(name, *arguments):
        environment = os.environ | {"PYTHONPATH": str(site)}
        done = subprocess.run([sys.executable, site / "bin" / name, *arguments], cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for name in ("attnzoo-train", "attnzoo-eval", "attnzoo-generate"):
        assert "attention: " in command(name, "--help") and not any(empty.iterdir())
    shutil.copytree(ROOT / "tests" / "data" / "earlier_run" / "corpus", empty / "corpus")
    tiny = ("data.seq_len=16", "model.dim=8", "model.n_layers=1", "model.n_heads=1", "data=text", "data.paths=[corpus]")
    command("attnzoo-train", *tiny, "trainer.max_steps=2", "hydra.run.dir=run", f"data.cache_dir={tmp_path / 'cache'}")
    assert (empty / "run" / "checkpoints" / "best.ckpt").is_file()
    command("attnzoo-eval", "ckpt_path=run", "evaluation=validation", "hydra.run.dir=read")
    assert (empty / "read" / "results.csv").is_file()
