"""What README and docs say: links lead somewhere, and every command line of ours composes."""

import ast
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from attnzoo.attention import AttentionSpec
from attnzoo.attention.base import POSITIONS
from attnzoo.models import from_config
from attnzoo.run.command_line import as_typed, register_options
from attnzoo_kernels.dispatch import IMPLEMENTATIONS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# the rows of README's table of speeds: what of the CSV file that the row links to it tells
SPEEDS = {
    "`flash`, 2048": "label == 'sdpa-cudnn' and x >= 2048",
    "`flash`, the same": "label in ('fa3', 'fa4') and x >= 2048",
    "`flash` at head dim 64": "label in ('fa3', 'fa4') and x >= 2048",
    "`block_sparse`": "label == 'flex'",
    "`differential`": "label == 'cudnn-2-calls' and x == 8192",
    "`decode_attention`": "label == 'attnzoo-triton' and case.str.contains('^b1-k65536-|^b64-k4096-')",
    "BERT-base training, 64 rows of 128": "label == 'huggingface' and unit == 'tokens/s' and panel.str.contains('328')",
    "BERT-base training, 64 rows of 512": "label == 'huggingface' and unit == 'tokens/s' and panel.str.contains('512')",
    "GPT-2 small training": "label == 'nanogpt' and unit == 'tokens/s'",
    "`tree_attention`": "label == 'flex' and x == 12288",
}
NOT_COMPOSED = ("--help", "hydra/launcher=submitit_slurm")  # the latter is an extra


def commands() -> list[str]:
    """What the fenced blocks say to train.py, eval.py, generate.py and attnzoo.show, without comments, each once."""
    found = {}
    for path in DOCUMENTS:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), flags=re.S):
            lines = iter(block.replace("\\\n", " ").replace("-m attnzoo.show", "show.py").splitlines())
            for line in lines:
                if re.match(r"python (train|eval|generate|show)\.py ", line):
                    found[shlex.join(_words(line, lines))] = None
    return sorted(found)


def _words(line: str, following: Iterator[str]) -> list[str]:
    """Of a command whose quotes may end on a later line."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return _words(f"{line} {next(following)}", following)


def first_of(swept: str) -> str:
    """Of an override of a sweep the first value; of a pattern of names the first one."""
    if pattern := re.fullmatch(r"(\w+)=glob\(([\w*]+)(,exclude=\w+)?\)", swept):
        return f"{pattern[1]}={min(path.stem for path in (ROOT / 'configs' / pattern[1]).glob(f'{pattern[2]}.yaml'))}"
    return swept if "[" in swept else swept.split(",")[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("command", commands())
def test_commands_compose(command):
    words = shlex.split(command)
    name, overrides = words[1].removesuffix(".py"), [as_typed(word, ("prompt", "text")) for word in words[2:] if word != "-m"]
    if any(word in NOT_COMPOSED for word in overrides):
        pytest.skip("not composed here")
    if "-m" in words:  # the first job of the sweep
        overrides = [first_of(word) for word in overrides]
    register_options(ROOT / "configs")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        compose(name, [word for word in overrides if not word.startswith("hydra.")])


def benchmark_tables() -> list[tuple[str, str]]:
    """(benchmark, tables) of each command `-m benchmarks.<benchmark> <tables> --options` that a document names."""
    texts = (" ".join(path.read_text().split()) for path in [*DOCUMENTS, ROOT / "benchmarks" / "NOTES.md"])
    found = (match for text in texts for match in re.findall(r"benchmarks\.(\w+)((?: [a-z]\w*)+)(?: --|`)", text))
    return sorted({(name, tables.strip()) for name, tables in found})


@pytest.mark.parametrize(("name", "tables"), benchmark_tables())
def test_tables_of_benchmarks_exist(name, tables):
    module = importlib.import_module(f"benchmarks.{name}")
    if not hasattr(module, "TABLES"):
        pytest.skip("it has commands of its own")
    assert set(tables.split()) <= module.TABLES.keys()


def speeds() -> list[list[str]]:
    """The cells of README's table of speeds, by row: operator, ratios, peer, command."""
    table = (ROOT / "README.md").read_text().partition("## Speed")[2].partition("\n|---")[2].partition("\n\n")[0]
    return [line.strip("|").split("|") for line in table.splitlines()[1:]]


@pytest.mark.parametrize("cells", speeds(), ids=lambda cells: cells[0].strip())
def test_speeds_in_readme_are_those_that_were_measured(cells):
    (chosen,) = (query for name, query in SPEEDS.items() if cells[0].strip().startswith(name))
    (source,) = re.findall(r"\]\((.*?\.csv)\)", cells[2])
    rows = pd.read_csv(ROOT / source).query(chosen)
    if "copy" in cells[2]:
        rows = rows.assign(ratio=rows.value / rows.copy_tb_s)
    # of several peers the fastest one, which is the least of our ratios
    best = rows.groupby(["direction", "panel", "x"]).ratio.min()
    told = re.findall(r"(\d+\.\d+)(?: to (\d+\.\d+))?(?: (forward|backward))?", cells[1])
    ratios = [best[direction] if direction else best for *_, direction in told]
    for (low, high, _), found in zip(told, ratios, strict=True):
        digits = len(low.partition(".")[2])
        assert (low, high or low) == (f"{found.min():.{digits}f}", f"{found.max():.{digits}f}")


def test_messages_of_the_troubleshooting_page_are_in_the_sources():
    files = [*(ROOT / "attnzoo").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    # without the seams of texts that go over several lines
    sources = "".join(re.sub(r"""["']\s*\n\s*f?["']""", "", path.read_text()) for path in files)
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M)
    quoted = [piece for row in rows for text in re.findall(r"`([^`]+)`", row) for piece in text.split("...")]
    assert len(quoted) > 40 and [piece for piece in quoted if piece not in sources] == []


def test_the_page_that_adds_a_variant_has_every_hook_of_the_plain_steps():
    hooks = {"LOOPS", "MASK", "LSE_BIAS"}  # without a function as the default
    for name in ("forward", "backward"):
        tree = ast.parse((ROOT / "kernels" / "attnzoo_kernels" / "_triton" / f"{name}.py").read_text())
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            given = function.args.args[-len(function.args.defaults):]
            hooks |= {one.arg for one, default in zip(given, function.args.defaults, strict=False)
                      if one.arg.isupper() and isinstance(default, ast.Name)}
    page = (ROOT / "docs" / "add-a-variant.md").read_text()
    told = [name for row in re.findall(r"^\| (`[A-Z_`, ]+)", page, flags=re.M) for name in re.findall(r"`([A-Z_]+)`", row)]
    assert set(told) == hooks


def test_the_variant_of_the_page_that_adds_one_works_as_it_stands(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "add-a-variant.md").read_text()
    source, config = (re.search(rf"```{language}\n(.*?)```", page, flags=re.S)[1] for language in ("python", "yaml"))
    (tmp_path / "cosine.py").write_text(source)
    spec = importlib.util.spec_from_file_location("attnzoo.attention.cosine", tmp_path / "cosine.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (scale,) = map(ast.literal_eval, re.findall(r"attention=cosine attention\.scale=(\S+)", page))  # of the page's command
    options, sizes = OmegaConf.to_container(OmegaConf.create(config)), {"vocab_size": 11, "dim": 16, "n_layers": 2, "n_heads": 2}
    assert from_config({"_target_": "attnzoo.models.GPT", **sizes, "train_context": 8}, options | {"scale": scale}).blocks
    torch.manual_seed(0)
    model = from_config({"_target_": "attnzoo.models.GPT", **sizes, "n_kv_heads": 1, "train_context": 8}, options).double()
    tokens = torch.randint(11, (1, 8))
    whole = model(tokens)
    cache = model.new_cache(1, 8)
    torch.testing.assert_close(torch.cat([model(piece, cache=cache) for piece in tokens.split([5, 1, 2], dim=1)], 1), whole)
    whole.sum().backward()
    assert all(block.attention.scale.grad.abs().min() > 0 for block in model.blocks)
    q, k, v = torch.randn(3, 1, 8, 2, 8, dtype=torch.float64)
    scores = 10 * torch.cosine_similarity(q[:, :, None], k[:, None], dim=-1)  # (batch, queries, keys, heads)
    weights = scores.masked_fill(torch.ones(8, 8).triu(1).bool()[..., None], -torch.inf).softmax(2)
    torch.testing.assert_close(model.blocks[0].attention.attend(q, k, v, None), torch.einsum("bijh,bjhd->bihd", weights, v))


def variants() -> str:
    """docs/variants/README.md's table, as layers and operators say it."""
    head = ("`attention=`", "GPT", "BERT", "packed", "trees", "positions", "window", "dropout", "cached decoding", "context parallel",
            "weights of `flash`", "GPU", "CPU")
    rows, flash = [head, ("---",) * len(head)], None
    configs = sorted((ROOT / "configs" / "attention").glob("*.yaml"))
    for config in sorted(configs, key=lambda config: config.stem != "flash"):
        name, layer = config.stem, get_class(OmegaConf.load(config)["_target_"])
        can, options = layer.supports, inspect.signature(layer).parameters
        built = layer(AttentionSpec(dim=32, n_heads=4, n_kv_heads=2, head_dim=8, layer=0, n_layers=1, causal=can.causal,
                                    positions=can.positions[0], train_context=4096))
        weights = {key: value.shape for key, value in built.state_dict().items()}
        flash = flash or weights
        own = "flash" if hasattr(inspect.getmodule(layer), "flash_attention") else name
        operator = importlib.util.find_spec(f"attnzoo_kernels.{own}") and importlib.import_module(f"attnzoo_kernels.{own}")
        paths = getattr(operator, "IMPLEMENTATIONS", IMPLEMENTATIONS) if operator else ()
        decodes = "by `decode_attention`" if hasattr(inspect.getmodule(layer), "decode_attention") else "yes"
        rows.append((
            f"[`{name}`]({'flash' if name == 'sdpa' else name}.md)",
            *("yes" if able else "-" for able in (can.causal, can.bidirectional and can.packed, can.packed, can.trees)),
            "all" if can.positions == POSITIONS else ", ".join(can.positions),
            "yes" if "window_size" in options else "by pattern" if "pattern" in options else "-",
            "yes" if can.dropout else "-", decodes if can.cache else "-",
            ", ".join(can.context_parallel) or "-", "yes" if weights == flash else "-",
            "Gluon, Triton" if "gluon" in paths else "Triton" if "triton" in paths else "PyTorch",
            "tiles" if "cpu" in paths else "reference" if paths else "PyTorch"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_table_of_variants_is_true():
    true = variants()
    assert true in (ROOT / "docs" / "variants" / "README.md").read_text(), f"docs/variants/README.md: its table must be\n{true}"


def test_the_examples_of_the_operators_page_run_as_they_stand():
    page = (ROOT / "docs" / "operators.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, flags=re.S)), {})
