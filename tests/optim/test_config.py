"""Options of optimizers and schedules: read as PyTorch names them, refused where they mean nothing."""

from __future__ import annotations

import pytest

from tutti.errors import UsageError
from tutti.optim.config import SGD, AdamW, Cosine, Step, check_optimizer, check_schedule


def test_options_are_read() -> None:
    assert check_optimizer("sgd:lr=0.5,momentum=0.9,nesterov=true") == SGD(lr=0.5, momentum=0.9, nesterov=True)
    assert check_optimizer("adamw") == AdamW(lr=1e-3, weight_decay=0.01)
    assert check_optimizer("adam").weight_decay == 0
    assert check_schedule("cosine:warmup=5ep,final=0.1") == Cosine(warmup="5ep", final=0.1)
    assert check_schedule("step:milestones=30ep+60ep") == Step(milestones=("30ep", "60ep"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adm", "did you mean 'adam'"),
        ("sgd:momentun=1", "did you mean 'momentum'"),
        ("sgd:lr=-1", "lr is -1.0"),
        ("sgd:lr=nan", "not a finite number"),
        ("sgd:lr=fast", "'fast' is not a number"),
        ("sgd:momentum=-0.1", "momentum is -0.1"),
        ("sgd:nesterov=true", "nesterov=true needs momentum"),
        ("sgd:nesterov=true,momentum=0.9,dampening=0.1", "dampening=0"),
        ("adam:beta1=1", "beta1 is 1.0"),
        ("adam:beta2=-0.5", "beta2 is -0.5"),
        ("adamw:eps=-1", "eps is -1.0"),
    ],
)
def test_bad_optimizers_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_optimizer(text)
    assert words in str(caught.value).lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cos", "did you mean 'cosine'"),
        ("step", "step needs milestones"),
        ("step:milestones=30", "cannot read '30' as a duration"),
        ("step:milestones=3ep,warmup=x", "cannot read 'x'"),
        ("cosine:warmup=5", "cannot read '5' as a duration"),
        ("linear:warmup_from=-1", "warmup_from is -1.0"),
        ("constant:final=0", "unknown option 'final'"),
    ],
)
def test_bad_schedules_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_schedule(text)
    assert words in str(caught.value).lower()
