"""What the processes that fork for tests import once, so that no process that they make does so again."""

from __future__ import annotations

from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "src"
_STRATEGIES = [path.relative_to(_SOURCE).with_suffix("") for path in (_SOURCE / "tutti" / "parallel").rglob("*.py")]

MODULES = (
    *("torch._dynamo", "torch.profiler", "tutti.train.main", "tutti.cli.app", "tutti.launcher.agent"),
    *sorted(".".join(path.parts).removesuffix(".__init__") for path in _STRATEGIES),
    # What runs import when they need it: the digits, servers, files, plots.
    *("zmq", "safetensors.torch", "tomli_w"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg"),
)
