"""A refusal in a script advises arguments of ``tutti.prepare``, and variables that it does not read are named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds


def prepare(**options: Any) -> tutti.Run:
    model = nn.Linear(3, 1)
    data = (torch.randn(12, 3), torch.randn(12, 1))
    return tutti.prepare(model, "sgd:lr=0.1", data, lambda called, batch: called(batch[0]).square().mean(), **options)


def refused(**options: Any) -> list[str]:
    try:
        prepare(**options)
    except tutti.errors.UsageError as error:
        return [str(error), *filter(None, (error.what, error.where, error.why, error.remedy))]
    return []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "single"}, "Take strategy='mirrored', or --devices 1"),
        ({"strategy": "sharded", "reproducible": True}, "Leave out reproducible, or take strategy='mirrored'"),
        ({"batch_size": 1}, "ake batch_size=2 or more"),
        ({"strategy": "sharded", "lr_scale": "adascale"}, "Take strategy='mirrored', or another lr_scale"),
    ],
)
def test_a_refusal_in_a_script_names_arguments(options: dict[str, Any], words: str) -> None:
    for whole, *parts in worlds.run(2, refused, **options):
        assert words in whole
        assert "--strategy" not in "".join(parts) and "--reproducible" not in "".join(parts)


def frames_of_tutti(given: str | None = None, verbosity: str = "quiet") -> list[str]:
    """Names of tutti's functions in the traceback of a refusal."""
    data = (torch.randn(12, 3), torch.randn(12, 1))

    def loss(called: nn.Module, batch: Any) -> torch.Tensor:
        raise tutti.errors.UsageError("of the script's own loss")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUTTI_VERBOSITY", verbosity)
        with pytest.raises(tutti.errors.UsageError) as refusal:
            run = tutti.prepare(nn.Linear(3, 1), "sgd:lr=0.1", data, loss, strategy=given or "tensor", batch_size=4)
            run.step(next(iter(run.epoch(0))))
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
    return [each.name for each in refusal.traceback if Path(tutti.__file__).parent in Path(each.path).parents]


def test_a_refusal_of_an_argument_shows_no_frame_of_tutti() -> None:
    assert frames_of_tutti("mirored") == []
    assert len(frames_of_tutti("mirored", verbosity="debug")) > 5


def test_a_refusal_in_the_scripts_own_code_keeps_all_frames() -> None:
    for names in worlds.run(2, frames_of_tutti):
        assert len(names) > 5


def restored(folder: str) -> str:
    prepare(workers=4).save(folder)
    try:
        prepare().restore(folder)
    except tutti.errors.CheckpointError as error:
        return str(error)
    return ""


def test_a_restore_in_a_script_names_arguments(tmp_path: Path) -> None:
    for said in worlds.run(2, restored, folder=str(tmp_path)):
        assert "workers=4 goes on as before" in said and "--workers" not in said


def warned(variables: dict[str, str], **options: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name, value in variables.items():
            patch.setenv(name, value)
        prepare(**options)
    return [str(each.message) for each in told if "no effect" in str(each.message)]


def test_variables_without_an_effect_are_named_once() -> None:
    variables = {"TUTTI_STRATEGY": "sharded", "TUTTI_CLIP": "1.0", "TUTTI_TIMEOUT": "60"}
    text = "have no effect in a script: give tutti.prepare clip=1.0, strategy='sharded'"
    assert worlds.run(2, warned, variables=variables) == [[f"TUTTI_CLIP, TUTTI_STRATEGY {text}"], []]


def test_a_variable_that_the_script_reads_itself_is_not_named() -> None:
    assert worlds.run(2, warned, variables={"TUTTI_CLIP": "1.0"}, clip=1.0) == [[], []]
