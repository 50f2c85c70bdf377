"""What ``tutti chaos`` cannot do is said before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.cli.app import main

TRAIN = ("train", "linear", "--devices", "3", "--workers", "4", "--checkpoint-every", "10st")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("kill", "--run", "nowhere"), "no process of this run was found"),
        (("kill", "--run", "nowhere", "--verify"), "--run names a run that is running already"),
        (("kill",), "no tutti train command is given"),
        (("kill", "--", "tutti", "run", "x.py"), "no tutti train command is given"),
        (("kill", "--rank", "3", "--", "tutti", *TRAIN), "there is no rank 3"),
        (("kill", "--rank", "first", "--", "tutti", *TRAIN), "--rank is 'first'"),
        (("kill", "--at-step", "0", "--", "tutti", *TRAIN), "--at-step is '0'"),
        (("kill", "--at-step", "random", "--", "tutti", *TRAIN), "random steps cannot be drawn"),
        (("kill", "--times", "0", "--", "tutti", *TRAIN), "--times is 0"),
        (("stop", "--for", "0", "--", "tutti", *TRAIN), "--for is 0"),
        (("slow", "--factor", "1", "--", "tutti", *TRAIN), "--factor is 1"),
        (("kill", "--reference", "nowhere", "--", "tutti", *TRAIN), "the reference is not a finished run"),
        (("soak", "--kinds", "kil", "--", "tutti", *TRAIN), "Did you mean 'kill'"),
        (("soak", "--kinds", "kill,fill", "--", "tutti", *TRAIN), "too large to fill"),
        (("soak", "--devices", "9", "--", "tutti", *TRAIN, "--reproducible"), "4 workers cannot be distributed over 9"),
        (("soak", "--devices", "2", "--", "tutti", *TRAIN), "--devices needs a run with --reproducible"),
        (("soak", "--faults", "0", "--", "tutti", *TRAIN), "--faults is 0"),
        (("fill", "--leave", "much", "--", "tutti", *TRAIN), "'much' is not a size"),
        (("kill", "--", "tutti", *TRAIN, "--strategy", "miror"), "Did you mean 'mirrored'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and not out and not list(tmp_path.glob("runs/*/metrics.jsonl"))
