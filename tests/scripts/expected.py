"""Which cases are refused, and why: ``refused.toml``, a reviewed list. Every other case equals its oracle."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tests import worlds
from tests.scripts.table import HERE, Case, form, matches

REFUSED = HERE / "refused.toml"


@dataclass(frozen=True)
class Refusal:
    """One entry.

    Attributes:
        scripts, strategies: patterns of names, separated by ``;``; ``!`` before one leaves out what it matches.
        reason: why, for the page; a reason of mathematics says what does not exist.
        kind: ``mathematics``; ``missing`` where the strategy could do it and does not yet; ``pytorch`` where an error
            of PyTorch's own ends the script in the line that asks for it, before any update.
        says: a part of that error; or of a refusal that comes when the script itself has written parameters, so that
            they are those of no step.
        form: scripts with this kind of loop alone.
        workers: ``spare``: only where there are more logical workers than data ranks.
        devices: only on so many devices.
        accelerators: only on accelerators.
    """

    scripts: str
    strategies: str
    reason: str
    kind: Literal["mathematics", "missing", "pytorch"]
    form: Literal["any", "step", "loop"] = "any"
    workers: Literal["any", "spare", "one_each"] = "any"
    devices: tuple[int, ...] = ()
    accelerators: bool = False
    says: str = ""

    def holds(self, case: Case) -> bool:
        """Whether this case is one of those that the entry says are refused."""
        return (
            matches(self.strategies, case.strategy)
            and matches(self.scripts, case.script.removeprefix("script_"))
            and self.form in ("any", form(case.script))
            and self.workers in ("any", "spare" if case.spare else "one_each")
            and (not self.devices or case.devices in self.devices)
            and (not self.accelerators or worlds.DEVICE != "cpu")
        )


@cache
def refusals() -> list[Refusal]:
    """The entries, in the file's order."""
    entries = tomllib.loads(REFUSED.read_text(encoding="utf-8")).get("refused", [])
    return [Refusal(**{**entry, "devices": tuple(entry.get("devices", ()))}) for entry in entries]


def refusal(case: Case) -> Refusal | None:
    """The first entry that holds; None where the case must equal its oracle."""
    return next((entry for entry in refusals() if entry.holds(case)), None)


def ended(case: Case, kind: str, text: str) -> str:
    """How a case ended: as it was judged, or ``refused`` where the list says how it is to end."""
    entry = refusal(case)
    if entry is None or not entry.says or entry.says not in text:
        return kind
    judged = "an error that is not tutti's" if entry.kind == "pytorch" else "was refused after a wrong update"
    return "refused" if kind == "wrong" and judged in text else kind
