"""The critical batch from branches of a checkpoint, against courses of the loss whose critical batch is known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from tests.planning.test_critical_batch import run_directory
from tutti.cli.app import main
from tutti.errors import NonFiniteError, UsageError
from tutti.planning.branch_fit import Branch, BranchFit, fit_branches
from tutti.planning.critical_batch import critical_batch, noise_evidence
from tutti.planning.noise_figure import write_noise_figure
from tutti.planning.recipe import read_recipe, write_recipe

BATCH, START = 64, 2.0
SCATTER, SEEDS = 0.004, 3


def branches(
    critical: float, multiples: tuple[int, ...] = (1, 2, 4, 8, 16), scatter: float = 0.0, seed: int = 0
) -> list[Branch]:
    """Branches whose loss falls by 0.5(1 + B/B_crit)/(1 + kB/B_crit), with normal scatter over seeds."""
    generator = random.Random(seed)
    found = []
    for multiple in multiples:
        fall = 0.5 * (1 + BATCH / critical) / (1 + multiple * BATCH / critical)
        found += [Branch(multiple, s, START - fall + scatter * generator.gauss(0, 1)) for s in range(SEEDS)]
    return found


@pytest.mark.parametrize("critical", [16.0, 64.0, 500.0, 2000.0])
def test_the_known_critical_batch_is_found(critical: float) -> None:
    fit = fit_branches(BATCH, START, branches(critical))
    assert fit.critical_batch == pytest.approx(critical, rel=0.03)
    assert fit.progress == pytest.approx(0.5, rel=0.02)
    assert fit.loss_at(4) == pytest.approx(fit.means()[4], abs=1e-3)
    # The loss exceeds that at the batch itself by 0.01 first where 0.5(1 - (1 + b)/(1 + kb)) does.
    known = [k for k in (1, 2, 4, 8, 16) if 0.5 * (1 - (1 + BATCH / critical) / (1 + k * BATCH / critical)) <= 0.01]
    assert fit.within == max(known)
    assert fit_branches(BATCH, START, branches(critical), tolerance=10).within == 16


def test_the_band_holds_the_truth_in_nine_of_ten() -> None:
    draws, truth = 200, 300.0
    held = 0
    for seed in range(draws):
        fit = fit_branches(BATCH, START, branches(truth, scatter=SCATTER, seed=seed))
        held += fit.low <= truth <= fit.high
    # Binomial 99.9 % interval of 0.9.
    assert abs(held / draws - 0.9) < 3.3 * math.sqrt(0.9 * 0.1 / draws)


def test_an_end_that_is_not_bounded() -> None:
    equal = [Branch(k, s, 1.5 + 0.002 * (s - 1)) for k in (1, 2, 4) for s in range(3)]
    fit = fit_branches(BATCH, START, equal)
    assert math.isinf(fit.high) and fit.low > 4 * BATCH and fit.within == 4
    useless = [Branch(k, s, START - 0.5 / k + 0.002 * (s - 1)) for k in (1, 2, 4) for s in range(3)]
    fit = fit_branches(BATCH, START, useless)
    assert fit.low == 0 and fit.high < BATCH and fit.within == 1


@pytest.mark.parametrize(
    ("start", "found", "words"),
    [
        (START, [Branch(1, 0, 1.0), Branch(2, 0, 1.0)], "at least three are needed"),
        (START, [Branch(2, 0, 1.0), Branch(4, 0, 1.0), Branch(8, 0, 1.0)], "at one times the batch"),
        (1.0, [Branch(1, 0, 1.0), Branch(2, 0, 1.0), Branch(4, 0, 1.0)], "did not lower the held-out loss"),
    ],
)
def test_branches_that_say_nothing_are_refused(start: float, found: list[Branch], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fit_branches(BATCH, start, found)


def test_a_branch_that_diverged_is_refused_as_diverged() -> None:
    with pytest.raises(NonFiniteError, match="at 2 × the batch diverged"):
        fit_branches(BATCH, START, [Branch(1, 0, 1.0), Branch(2, 0, math.nan), Branch(4, 0, 1.0)])


def known_target(folder: Path, critical: float, noise: float | None) -> list[Path]:
    paths = []
    for batch in (16, 64, 256):
        samples = round(64000 * (1 + batch / critical)) + 50
        paths.append(run_directory(folder / str(batch), batch, noise=noise, samples=samples, target=0.9))
    return paths


def test_all_three_ways_stand_in_the_recipe_and_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [noise_evidence(path) for path in known_target(tmp_path, 400.0, noise=200.0)]
    fit = fit_branches(BATCH, START, branches(300.0, scatter=SCATTER))
    found = critical_batch(runs, branches=fit)
    assert found.recipe is not None
    write_recipe(found.recipe, tmp_path / "recipe.json")
    ways = {way.name: way for way in read_recipe(tmp_path / "recipe.json").ways}
    assert list(ways) == ["noise", "branches", "target"]
    for name, truth in (("noise", 200.0), ("branches", 300.0), ("target", 400.0)):
        assert ways[name].low < truth < ways[name].high, name
        assert ways[name].critical_batch == pytest.approx(truth, rel=0.25), name
    # Samples at three batch sizes decide over the two priors.
    assert found.critical_batch == pytest.approx(400, rel=0.15)
    assert found.basis.endswith("3 batch sizes, and gradient noise, and branches of a checkpoint")
    write_noise_figure(runs, found, tmp_path / "noise.svg")
    drawn = (tmp_path / "noise.svg").read_text()
    for title in ("gradient noise scale", "branches of a checkpoint", "accuracy 0.9", "critical batch by each way"):
        assert f"<!-- {title}" in drawn, title


def test_branches_are_surer_than_noise_and_narrow_one_batch(tmp_path: Path) -> None:
    alone = noise_evidence(run_directory(tmp_path / "a", 64, noise=200.0))
    fit = fit_branches(BATCH, START, branches(1000.0, scatter=SCATTER))
    found = critical_batch([alone], branches=fit)
    assert found.critical_batch == fit.critical_batch and found.recipe is None
    assert [way.name for way in found.ways] == ["noise", "branches"]
    # With one batch size, the prior is both: between noise and branches, nearer to the branches.
    one = noise_evidence(run_directory(tmp_path / "b", 64, noise=200.0, samples=5000, target=0.9))
    both, noise = critical_batch([one], branches=fit), critical_batch([one])
    assert noise.critical_batch < both.critical_batch < fit.critical_batch
    assert math.log(fit.critical_batch / both.critical_batch) < math.log(both.critical_batch / noise.critical_batch)


def test_the_command_says_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = known_target(tmp_path, 400.0, noise=200.0)
    assert main(["noise", *map(str, paths), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [way["name"] for way in said["ways"]] == ["noise", "target"] and said["branches"] is None
    assert main(["noise", *map(str, paths)]) == 0
    assert "samples to the target at 3 batch sizes alone" in capsys.readouterr().out


def test_unbounded_branches_without_noise_are_refused(tmp_path: Path) -> None:
    run = noise_evidence(run_directory(tmp_path / "a", 64, noise=None))
    wild = [Branch(k, s, 1.5 + 0.3 * (-1) ** (s + k)) for k in (1, 2) for s in range(3)]
    fit = fit_branches(BATCH, START, wild)
    assert isinstance(fit, BranchFit) and fit.low == 0 and math.isinf(fit.high)
    with pytest.raises(UsageError, match="neither from below nor from above"):
        critical_batch([run], branches=fit)
