"""The inline assembly of sigmoid attention's weights, carried out by numpy on any number of lanes of one warp."""

import itertools
import re

import numpy as np
import pytest

from attnzoo_kernels.sigmoid import hooks

BLOCKS = {"plain": (hooks.SIGMOID.value, hooks.SHARING.value), "hopper": (hooks.HOPPER_SIGMOID.value, hooks.TOGETHER.value)}
EXTREMES = (-np.inf, -200.0, -30.0, -2.0, 0.0, 29.0, 120.0, np.inf)


def fma(a, b, c):
    return (a.astype(np.float64) * b + c).astype(np.float32)


OPERATIONS = {
    "mov.b32": lambda a: a,
    "neg.f32": lambda a: -a,
    "add.f32": lambda a, b: a + b,
    "mul.f32": lambda a, b: a * b,
    "fma.rn.f32": fma,
    "min.NaN.f32": np.minimum,
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.float32),
    "setp.gt.s32": lambda a, b: a.view(np.int32) > b.view(np.int32),
    "vote.sync.any.pred": lambda a, lanes: np.any(a),
    "rcp.approx.ftz.f32": lambda a: np.where(np.float32(1) / a < 2.0**-126, np.float32(0), np.float32(1) / a),
}


def literal(text):
    number = int(text[2:], 16) if text[:2] in ("0f", "0x") else int(text)
    return np.array([number], np.uint32).view(np.float32)


def carried_out(block, powers):
    """The results of a block of assembly for powers (registers, lanes)."""
    held = {f"${len(powers) + n}": row for n, row in enumerate(powers)}
    statements = [x.strip() for x in re.split("[;:{}]", block) if x.strip() and ".reg" not in x]
    wanted = None  # the label that a branch leads to
    for statement in statements:
        if wanted or statement.isupper():
            wanted = None if statement == wanted else wanted
            continue
        guard, name, operands = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", statement).groups()
        operands = operands.split(", ")
        if name == "bra.uni":
            wanted = operands[0] if guard is None or held[guard] else None
        else:
            read = [held[x] if x in held else literal(x) for x in operands[1:]]
            held[operands[0]] = OPERATIONS[name](*read)
    assert wanted is None
    return np.stack([np.broadcast_to(held[f"${n}"], powers.shape[1:]) for n in range(len(powers))])


def weights(which, scores):
    """Of scores (groups of SHARING, lanes), as often as the block has groups."""
    block, together = BLOCKS[which]
    with np.errstate(all="ignore"):
        powers = np.exp2(np.tile(scores, (together // len(scores), 1)).astype(np.float32))
        powers[powers < 2.0**-126] = 0
        return carried_out(block, powers)[: len(scores)]


@pytest.mark.parametrize("which", BLOCKS)
def test_every_combination_of_extreme_scores(which):
    scores = np.array(list(itertools.product(EXTREMES, repeat=hooks.SHARING.value))).T
    ours, exact = weights(which, scores), 1 / (1 + np.exp2(-scores))
    assert (ours[scores < -126] == 0).all()
    assert (np.abs(ours - exact)[scores > -126] <= 2.0**-21 * exact[scores > -126]).all()


@pytest.mark.parametrize("which, error", (("plain", 2.0**-21), ("hopper", 2.0**-12 + 2.0**-21)))
def test_small_weights(which, error):
    scores = np.linspace(-120, np.log2(hooks.SMALL), 40000, dtype=np.float32).reshape(hooks.SHARING.value, -1)
    exact = 1 / (1 + np.exp2(-scores.astype(np.float64)))
    assert (np.abs(weights(which, scores) - exact) <= error * exact).all()


@pytest.mark.parametrize("which", BLOCKS)
@pytest.mark.parametrize("others", (-10.0, 3.0, -np.inf, np.inf))
def test_nan_stays_nan(which, others):
    scores = np.full((hooks.SHARING.value, hooks.SHARING.value), others)
    np.fill_diagonal(scores, np.nan)
    assert np.isnan(np.diagonal(weights(which, scores))).all()
