"""What is seen of a run: fixed columns in a pipe, a live display in a real pseudo terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from tutti.config.train_config import TrainConfig
from tutti.metrics.listener import EvalRecord, Pace, RunHeader
from tutti.metrics.progress import LiveDisplay, PlainLines, terminal_listener
from tutti.types.step_records import StepRecord

HEADER = RunHeader("digits · mirrored · adam", {"workers": "8", "global batch": "128 = 8 × 16"}, 7, 7)

PLAIN = """\
digits · mirrored · adam
  workers       8
  global batch  128 = 8 × 16

group     step  epoch       loss    accuracy   samples/s     time      ETA
train        1      0     2.3000      0.0000       1,280     0:00     0:06
train        3      0     0.7667      0.6667       1,280     0:02     0:04
warning: a step was skipped
train        6      0     0.3833      0.8333       1,280     0:05     0:01
train        7      0     0.3286      0.8571       1,280     0:06     0:00
eval         7      1     0.2500      0.9000
"""


def play(listener: LiveDisplay | PlainLines) -> None:
    listener.started(HEADER)
    for number in range(1, 8):
        record = StepRecord(number, 0, number * 128, number, 2.3 / number, {"accuracy": 1 - 1 / number})
        listener.stepped(record, Pace(1280.0, number - 1, 7 - number))
        if number == 4:
            listener.warned("a step was skipped")
    listener.evaluated(EvalRecord(7, 1, 0.25, {"accuracy": 0.9}, 300))
    listener.finished({})
    listener.close()


def test_plain_lines() -> None:
    stream = io.StringIO()
    listener = terminal_listener(stream, TrainConfig(log_every=3))
    assert isinstance(listener, PlainLines)
    play(listener)
    assert stream.getvalue() == PLAIN


def test_a_run_whose_length_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.HEADER", RunHeader("title", {}, None, None))
    lines = io.StringIO()
    play(PlainLines(lines, 3))
    assert [line.split()[1] for line in lines.getvalue().splitlines() if line.startswith("train ")] == ["1", "3", "6"]
    display = io.StringIO()
    play(LiveDisplay(display))
    assert "epoch 0" in display.getvalue() and "7/" not in display.getvalue()


def test_an_average_and_the_weights_themselves_have_a_line_each() -> None:
    stream = io.StringIO()
    listener = PlainLines(stream, 1)
    listener.evaluated(EvalRecord(7, 1, 0.25, {"accuracy": 0.9}, 300, raw={"loss": 0.5, "accuracy": 0.8}))
    rows = [line.split() for line in stream.getvalue().splitlines()]
    assert rows[1:] == [["ema", "7", "1", "0.2500", "0.9000"], ["raw", "7", "1", "0.5000", "0.8000"]]


def test_slow_steps_are_shown_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("tutti.metrics.progress.time.monotonic", lambda: now)
    stream = io.StringIO()
    listener = PlainLines(stream, log_every=50)
    for number in range(1, 8):
        listener.stepped(StepRecord(number, 0, number, number, 1.0), Pace(1, 0, 0))
        now += 4.0
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["step", "1", "4", "7"]


def test_a_lost_stream_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    play(PlainLines(stream, 1))
    with pytest.raises(BrokenPipeError):
        stream.close()


PLAY = """
import sys
from tests.metrics.test_progress import play
from tutti.config.train_config import TrainConfig
from tutti.metrics.progress import terminal_listener
listener = terminal_listener(sys.stderr, TrainConfig(log_every=3))
print(type(listener).__name__)
play(listener)
"""


def in_terminal(**environ: str) -> tuple[str, str]:
    """Standard output, and what a pseudo terminal on standard error was sent."""
    ours, theirs = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    child = subprocess.Popen(
        [sys.executable, "-c", PLAY],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**variables, "COLUMNS": "80", "LINES": "24", **environ},
    )
    os.close(theirs)
    sent = b""
    # Linux says EIO when the last process has closed the terminal.
    try:
        while part := os.read(ours, 65536):
            sent += part
    except OSError:
        pass
    os.close(ours)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0, sent.decode()
    return out.strip(), sent.decode()


def screen(sent: str) -> list[str]:
    """The lines of a terminal after ``sent``: text, carriage returns, cursor up and erase line are all that is used."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", sent):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1] or 1)
        elif token.endswith("K") and token[0] == "\x1b":
            lines[row] = ""
        elif token[0] != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def test_live_display() -> None:
    out, sent = in_terminal(TERM="xterm-256color")
    assert out == "LiveDisplay"
    assert "\x1b[?25l" in sent and sent.count("\x1b[?25h") >= 1
    shown = screen(sent)
    text = "\n".join(shown)
    assert shown[0] == "digits · mirrored · adam"
    assert re.search(r"global batch +128 = 8 × 16", text)
    held_out = shown.index("held out  epoch 1  step 7  loss 0.2500  accuracy 0.9000")
    last = [line for line in shown[held_out + 1 :] if line]
    assert re.fullmatch(r"epoch 0 .*7/7  ETA 0:00", last[0])
    assert last[1:] == ["loss 0.3286  accuracy 0.8571  1,280 samples/s"]
    assert shown.index("warning: a step was skipped") < held_out
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_plain_in_a_terminal_that_cannot_draw(environ: dict[str, str]) -> None:
    out, sent = in_terminal(**environ)
    assert out == "PlainLines"
    assert sent.replace("\r\n", "\n") == PLAIN
