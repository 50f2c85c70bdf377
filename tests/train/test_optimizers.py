"""What becomes of the optimizer that a run is given."""

from __future__ import annotations

import pytest
from torch import nn

from tutti.config.optimizer_config import OptimizerChoice
from tutti.errors import UsageError
from tutti.train.optimizers import check_fits

MODEL = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


@pytest.mark.parametrize("optimizer", ["muon", "muon:adam=none", "muon:adam=1.*", "lars:exclude=*bias+1.weight", "sgd"])
def test_patterns_of_names_that_the_model_has(optimizer: str) -> None:
    check_fits(OptimizerChoice.parse(optimizer), MODEL)


@pytest.mark.parametrize("optimizer", ["muon:adam=2.*", "lamb:exclude=*bias+2.*", "lars:exclude=1"])
def test_a_pattern_that_no_parameter_has_is_named(optimizer: str) -> None:
    """Nothing else would tell: the step would be another one."""
    with pytest.raises(UsageError, match=r"no parameter '(2\.\*|1)'.*(adam|exclude).*0\.weight"):
        check_fits(OptimizerChoice.parse(optimizer), MODEL)
