"""Options of optimizers and schedules: read as PyTorch names them, refused where they mean nothing."""

from __future__ import annotations

import pytest

from tutti.config.optimizer_config import (
    AdamWConfig,
    CosineSchedule,
    LAMBConfig,
    LARSConfig,
    MuonConfig,
    SGDConfig,
    StepSchedule,
    check_optimizer,
    check_schedule,
)
from tutti.errors import UsageError


def test_options_are_read() -> None:
    assert check_optimizer("sgd:lr=0.5,momentum=0.9,nesterov=true") == SGDConfig(lr=0.5, momentum=0.9, nesterov=True)
    assert check_optimizer("adamw") == AdamWConfig(lr=1e-3, weight_decay=0.01)
    assert check_optimizer("adam").weight_decay == 0
    assert check_optimizer("lamb:lr=0.1,bias_correction=false,trust_clip=1,exclude=embed.*+head.*") == LAMBConfig(
        lr=0.1, bias_correction=False, trust_clip=1.0, exclude=("embed.*", "head.*")
    )
    assert check_optimizer("lars:denominator=norm_of_sum,fused=false") == LARSConfig(
        denominator="norm_of_sum", fused=False
    )
    assert check_optimizer("muon:lr=0.02,adam_lr=1e-3,adam=0.*") == MuonConfig(lr=0.02, adam_lr=1e-3, adam=("0.*",))
    assert check_schedule("cosine:warmup=5ep,final=0.1") == CosineSchedule(warmup="5ep", final=0.1)
    assert check_schedule("step:milestones=30ep+60ep") == StepSchedule(milestones=("30ep", "60ep"))


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
        ("lamd", "did you mean 'lamb'"),
        ("lars:nesterov=true,momentum=0", "nesterov=true needs momentum"),
        ("larc:trust=-1", "trust is -1.0"),
        ("lars:momentum_correction=true,lr_in_momentum=false", "the rate inside it"),
        ("lars:momentum_correction=true,momentum=0", "needs momentum above 0"),
        ("larc:momentum_correction=true", "unknown option 'momentum_correction'"),
        ("larc:denominator=norm_of_sum", "unknown option 'denominator'"),
        ("lars:denominator=sum", "choices: norm_of_sum, sum_of_norms"),
        ("lamb:trust_clip=0", "trust_clip is 0.0"),
        ("lamb:max_grad_norm=-1", "max_grad_norm is -1.0"),
        ("novograd:beta2=1", "beta2 is 1.0"),
        ("novograd:init=second", "'second' is not possible"),
        ("muon:ns_steps=0", "ns_steps is 0"),
        ("muon:momentum=1", "momentum is 1.0"),
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
        ("linear:final=-0.1", "final is -0.1"),
        ("cosine:final=-1", "final is -1.0"),
        ("constant:final=0", "unknown option 'final'"),
    ],
)
def test_bad_schedules_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_schedule(text)
    assert words in str(caught.value).lower()
