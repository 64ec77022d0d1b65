"""The lm-evaluation-harness on our models: likelihoods and texts equal the model's own; a task of a local file; clear refusals."""

import csv
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_run import compose_tiny

from attnzoo import runner
from attnzoo.attention.sdpa import SDPAttention
from attnzoo.data.tokenizers import ByteTokenizer
from attnzoo.errors import UserError
from attnzoo.evaluation import harness
from attnzoo.evaluation.harness import lm_eval
from attnzoo.models import GPT

BYTES = ByteTokenizer()
LENGTH = 24


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[lm-eval\]'"):
        lm_eval(None, None, context=8, tasks=["x"])


@pytest.fixture
def key(tmp_path, monkeypatch):
    """What names the measurement of a task in tmp_path beside checkpoint and data; the harness is a stand-in that knows this task."""
    data = tmp_path / "data" / "questions.jsonl"
    for path, text in {data: "a", tmp_path / "tasks" / "mine.yaml": "task: mine", tmp_path / "tasks" / "utils.py": "pass"}.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    config = {"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": [str(data.parent / "*.jsonl")]}}}
    index = {"mine": SimpleNamespace(cfg=config, yaml_path=tmp_path / "tasks" / "mine.yaml")}
    index["a_tag"] = SimpleNamespace(cfg=None, yaml_path=None)
    manager = SimpleNamespace(all_tasks=["mine"], task_index=index)
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=lambda include_path: manager))
    monkeypatch.setattr(harness.importlib.metadata, "version", lambda name: "1.0")

    def key(include_path: str | None = None) -> str:
        data = SimpleNamespace(objective="lm", tokenizer=BYTES)
        (one,) = lm_eval(None, data, context=8, tasks=["mine"], include_path=include_path).measurements
        return json.dumps(dict(one.settings), sort_keys=True)

    return key


@pytest.mark.parametrize("file", ["tasks/mine.yaml", "tasks/utils.py", "data/questions.jsonl"])
def test_an_edited_task_has_another_key_in_the_store(key, tmp_path, file):
    before = key()
    assert key() == before
    (tmp_path / file).write_text("edited")
    assert key() != before


def test_another_harness_or_include_path_has_another_key_in_the_store(key, tmp_path, monkeypatch):
    before = key()
    assert key(str(tmp_path / "tasks")) != before
    monkeypatch.setattr(harness.importlib.metadata, "version", lambda name: "1.1")
    assert key() != before


@pytest.fixture(scope="module")
def adapter():
    pytest.importorskip("lm_eval")
    from attnzoo.evaluation.harness_model import HarnessModel

    torch.manual_seed(0)
    model = GPT(vocab_size=BYTES.vocab_size, dim=32, n_layers=2, n_heads=2, attention=SDPAttention, train_context=LENGTH)
    for parameter in model.parameters():
        parameter.data *= 3
    return HarnessModel(model.eval().double(), BYTES, max_length=LENGTH, batch_tokens=60)


def request(*arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)


def loglikelihood(model, context: list[int], continuation: list[int]) -> float:
    ids = torch.tensor([(context + continuation)[:-1][-LENGTH:]])
    logits = model(ids)[0, -len(continuation) :].float()
    return -F.cross_entropy(logits, torch.tensor(continuation), reduction="sum").item()


def test_likelihoods_are_the_models_own(adapter):
    pairs = [("What is it? ", "a cat"), ("", "ab"), ("x" * 40, " long"), ("short", "er")]
    found = adapter.loglikelihood([request(*pair) for pair in pairs])
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        before = BYTES.encode(context.rstrip()) or [BYTES.eos_id]
        after = BYTES.encode(context[len(context.rstrip()) :] + continuation)
        assert value == pytest.approx(loglikelihood(adapter.model, before, after))


def test_greedy_is_what_generation_gives(adapter):
    prompt = torch.tensor([BYTES.encode("Once upon")])
    written = adapter.model.generate(prompt, 6, temperature=0.0)[0, prompt.shape[1] :].tolist()
    other = [*written[:-1], (written[-1] + 1) % 256]
    (_, same), (_, unlike) = adapter._loglikelihood_tokens([(None, prompt[0].tolist(), written), (None, prompt[0].tolist(), other)])
    assert same and not unlike


def test_whole_texts_are_read_in_windows_and_every_token_counts_once(adapter):
    text = "0123456789" * 6
    (value,) = adapter.loglikelihood_rolling([request(text)])
    ids = [BYTES.eos_id, *BYTES.encode(text)]
    total = loglikelihood(adapter.model, ids[:1], ids[1 : LENGTH + 1])
    for begin in range(LENGTH, len(ids) - 1, LENGTH):
        end = min(begin + LENGTH, len(ids) - 1)
        total += loglikelihood(adapter.model, ids[:begin + 1], ids[begin + 1 : end + 1])
    assert value == pytest.approx(total)


def test_generation_ends_at_the_tasks_stops(adapter):
    options = {"max_gen_toks": 8}
    (free,) = adapter.generate_until([request("Once", options)])
    prompt = torch.tensor([BYTES.encode("Once")])
    ids = adapter.model.generate(prompt, 8, temperature=0.0)[0, 4:].tolist()
    assert free == BYTES.decode(ids[: ids.index(BYTES.eos_id)] if BYTES.eos_id in ids else ids)
    stop = free[2:3]
    (stopped,) = adapter.generate_until([request("Once", {**options, "until": [stop]})])
    assert stopped == free[: free.index(stop)]
    (clipped,) = adapter.generate_until([request("y" * 100, {"max_gen_toks": 500})])
    assert len(clipped.encode()) >= 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("harness")
    runner.train(compose_tiny(folder, "trainer.max_steps=2", "callbacks.sample=null", "callbacks.plot=null"))
    with open(folder / "questions.jsonl", "w") as file:
        for n in range(6):
            choices = [f" {2 * n}", f" {2 * n + 1}"]
            file.write(json.dumps({"question": f"2 times {n} is", "choices": choices, "answer": 0}) + "\n")
    (folder / "tasks").mkdir()
    (folder / "tasks" / "doubling.yaml").write_text(f"""
task: doubling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / 'questions.jsonl'}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")
    return folder


def evaluate(folder, *overrides):
    options = ["evaluation=lm_eval", f"evaluation.tasks.lm_eval.include_path={folder / 'tasks'}", f"ckpt_path={folder / 'run'}"]
    options.append("accelerator=cpu")
    runner.evaluate(compose_tiny(folder, f"run_dir={folder / 'result'}", *options, *overrides, config="eval"))
    with open(folder / "result" / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_local_task(trained):
    (row,) = evaluate(trained, "evaluation.tasks.lm_eval.tasks=[doubling]")
    assert (row["task"], row["metric"], row["count"], row["length"]) == ("lm_eval_doubling", "acc", "6", "32")
    assert float(row["value"]) * 6 == pytest.approx(round(float(row["value"]) * 6)) and float(row["stderr"]) >= 0
    (row,) = evaluate(trained, "evaluation.tasks.lm_eval.tasks=[doubling]", "evaluation.tasks.lm_eval.limit=2")
    assert row["count"] == "2"


@pytest.mark.parametrize("tasks, message", [("[dobling]", "'dobling' is no task.*doubling"), ("[]", "name at least one")])
def test_unknown_tasks_are_named(trained, tasks, message):
    with pytest.raises(UserError, match=message):
        evaluate(trained, f"evaluation.tasks.lm_eval.tasks={tasks}")
