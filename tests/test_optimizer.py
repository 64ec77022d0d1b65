"""Learning rates by step, which parameters decay, and Muon beside AdamW."""

import math
from copy import deepcopy

import pytest
import torch
from tiny_run import column, compose_tiny
from torch import nn
from torch.testing import assert_close

from attnzoo import checkpoint, runner
from attnzoo.errors import UserError
from attnzoo.training.optimizer import AdamWRecipe, MuonRecipe
from attnzoo.training.schedule import Schedule

COSINE, CONSTANT = Schedule("cosine", 1.0), Schedule("linear", 0.0)
RECIPE = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "schedule": COSINE, "warmup_steps": 4, "final_lr": 0.1}
MUON = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "ns_steps": 3}


def rates(n_steps: int, total: float = 20, **changes) -> list[float]:
    return [AdamWRecipe(**RECIPE | changes).factor(step, lambda: total) for step in range(n_steps)]


def test_cosine_and_linear_end_at_the_last_learning_rate():
    cosine = rates(25)
    assert cosine[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert cosine[4:20] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * step / 16)) / 2 for step in range(16)])
    assert cosine[20:] == pytest.approx([0.1] * 5)
    assert rates(15, 10**9, schedule=Schedule("linear", 1.0), total_steps=24)[14] == pytest.approx(0.55)


def test_constant_needs_no_end_and_the_others_do():
    assert AdamWRecipe(**RECIPE | {"schedule": CONSTANT}).factor(10**6, lambda: math.inf) == 1.0
    for changes in ({}, {"schedule": CONSTANT, "warmup_steps": 0.1}):
        with pytest.raises(UserError, match="needs an end"):
            AdamWRecipe(**RECIPE | changes).factor(10, lambda: math.inf)


def test_warm_up_stable_decay():
    wsd = rates(30, 24, schedule=Schedule("1-sqrt", 0.25))
    assert wsd[4:20] == [1.0] * 16  # of 20 steps after the warm-up the last five decay
    assert wsd[19:] == pytest.approx([1.0, *(1 - 0.9 * math.sqrt(step / 5) for step in range(1, 5)), *[0.1] * 6])


def test_a_warm_up_can_be_a_share_of_the_run():
    assert rates(20, warmup_steps=0.2) == rates(20)
    assert rates(3, warmup_steps=0) == pytest.approx(rates(3, warmup_steps=0.001))
    assert rates(1, warmup_steps=0) == [1.0]


@pytest.mark.parametrize(("changes", "message"), [
    ({"lr": -1}, "optimizer.lr=-1: must be a number above 0"), ({"lr": 0}, "must be a number above 0"),
    ({"lr": math.nan}, "optimizer.lr=nan: must be a number above 0"), ({"lr": math.inf}, "above 0"),
    ({"betas": (0.9,)}, "must be a list of 2 numbers"),
    ({"betas": (1.5, 2)}, "betas=.* must be a list of 2 numbers of at least 0 and below 1"),
    ({"warmup_steps": 2.5}, "must be a whole number of at least 0 or a number of at least 0 and below 1"),
])
def test_what_is_out_of_range_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        AdamWRecipe(**RECIPE | changes)


def test_a_schedule_by_its_name_says_how_to_choose_it():
    with pytest.raises(UserError, match="optimizer.schedule='linear': .* with schedule="):
        AdamWRecipe(**RECIPE | {"schedule": "linear"})


@pytest.mark.parametrize("scaled", [False, True])
def test_only_matrices_decay(scaled):
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    model[2].weight.requires_grad_(False)
    optimizer, _ = AdamWRecipe(**RECIPE).build(
        model.named_parameters(), matrices={"0.weight", "2.weight"}, total_steps=lambda: 10, scaled_gradients=scaled
    )
    decayed, rest = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    assert [p.shape for p in decayed["params"]] == [(5, 4)]
    assert [p.shape for p in rest["params"]] == [(4,), (4,), (3,)]
    assert optimizer.defaults["fused"] is not scaled


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(5, 4), nn.ModuleList([nn.Linear(4, 3)])

    def forward(self, ids):
        return self.blocks[0](self.embedding(ids))


def build_muon(model: nn.Module):
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    recipe = MuonRecipe(**RECIPE | MUON | {"warmup_steps": 1})
    return recipe.build(model.named_parameters(), matrices=matrices, total_steps=lambda: 10, scaled_gradients=False)


def steps(model: nn.Module, optimizer, schedule, n: int) -> None:
    for _ in range(n):
        optimizer.zero_grad()
        optimizer.step(lambda: (loss := model(torch.arange(5)).square().sum()).backward() or loss)
        schedule.step()


def test_muon_trains_the_matrices_of_blocks_and_adamw_the_rest():
    torch.manual_seed(0)
    ours, theirs = Blocks(), Blocks()
    theirs.load_state_dict(ours.state_dict())
    optimizer, schedule = build_muon(ours)
    steps(ours, optimizer, schedule, 3)
    hidden = theirs.blocks[0].weight
    muon = torch.optim.Muon([hidden], weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **MUON)
    adamw = torch.optim.AdamW([{"params": [theirs.embedding.weight], "weight_decay": 0.1},
                               {"params": [theirs.blocks[0].bias], "weight_decay": 0.0}], betas=(0.9, 0.95))
    for step in range(3):
        for group in [*muon.param_groups, *adamw.param_groups]:
            group["lr"] = 0.1 * AdamWRecipe(**RECIPE | {"lr": 0.1, "warmup_steps": 1}).factor(step, lambda: 10)
        theirs.zero_grad()
        theirs(torch.arange(5)).square().sum().backward()
        muon.step()
        adamw.step()
    assert_close(ours.state_dict(), theirs.state_dict())


def test_muon_goes_on_from_its_state():
    torch.manual_seed(0)
    model, again = Blocks(), Blocks()
    parts = build_muon(model)
    steps(model, *parts, 2)
    again.load_state_dict(model.state_dict())
    resumed = build_muon(again)
    for new, old in zip(resumed, parts, strict=True):
        new.load_state_dict(deepcopy(old.state_dict()))
    steps(model, *parts, 2)
    steps(again, *resumed, 2)
    assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_muon_refuses_shards():
    with pytest.raises(UserError, match="trainer=fsdp and trainer=fsdp2 split them; take trainer=ddp or optimizer=adamw"):
        MuonRecipe(**RECIPE).build([("blocks.0.weight", nn.Parameter(torch.zeros(12)))], matrices={"blocks.0.weight"},
                                   total_steps=lambda: 10, scaled_gradients=False)


def test_a_run_with_muon_learns_and_keeps_both_states(tmp_path):
    shared = ["optimizer=muon", "schedule=wsd", "callbacks.sample=null", "callbacks.plot=null"]
    runner.train(compose_tiny(tmp_path, *shared))
    losses = [float(loss) for loss in column(tmp_path, "train/loss")]
    assert losses[-1] < losses[0]
    groups = checkpoint.read(tmp_path / "run" / "checkpoints" / "last.ckpt")["optimizer_states"][0]["param_groups"]
    assert "momentum" in groups[0] and "betas" in groups[1]


def test_a_checkpoint_of_the_schedule_that_was_is_resumed():
    model = Blocks()
    optimizer, schedule = AdamWRecipe(**RECIPE).build(
        model.named_parameters(), matrices=set(), total_steps=lambda: 10, scaled_gradients=False
    )
    # as torch.optim.lr_scheduler.LambdaLR writes it for a function
    schedule.load_state_dict({
        "base_lrs": [1.0, 1.0], "last_epoch": 7, "_step_count": 8, "_is_initial": False, "_get_lr_called_within_step": False,
        "_last_lr": [0.5, 0.5], "lr_lambdas": [None, None],
    })
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(AdamWRecipe(**RECIPE).factor(8, lambda: 10))
