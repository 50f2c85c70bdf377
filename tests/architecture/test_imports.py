"""What loads when: the command line answers without torch, and ``import tutti`` needs torch and numpy alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.architecture.sources import ROOT, modules

EXTRAS = ("data", "demo", "plot", "tensorboard")
IMPORT_NAMES = {"pillow": "PIL", "scikit-learn": "sklearn", "tomli-w": "tomli_w"}


def fresh(code: str) -> str:
    """What ``code`` prints in a new interpreter; its error, where it fails, is this test's."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_torch() -> list[str]:
    """Modules that must load without torch: the command line, every configuration, the tables and shared nouns."""
    shared = ["tutti.errors", "tutti.config.spec", "tutti.parallel", "tutti.cli.app"]
    return shared + [name for name in modules() if name.endswith("_config") or name.startswith("tutti.types.")]


def test_the_command_line_and_configurations_load_without_torch() -> None:
    """One interpreter loads all modules, and names the first one that has loaded a heavy package."""
    code = f"""
        import importlib, sys
        for name in {without_torch()!r}:
            importlib.import_module(name)
            loaded = [heavy for heavy in ("torch", "sklearn", "pyarrow") if heavy in sys.modules]
            if loaded:
                print(name, loaded)
                break
    """
    assert fresh(_dedent(code)) == ""


def test_import_tutti_leaves_heavy_parts_of_torch_alone() -> None:
    # torch imports parts of itself: only what tutti adds counts.
    code = """
        import sys, torch
        before = set(sys.modules)
        import tutti
        heavy = ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo", "torch.distributed.elastic")
        print(sorted(m for m in set(sys.modules) - before if m.startswith(heavy)))
    """
    assert fresh(_dedent(code)) == "[]"


def other_dependencies() -> list[str]:
    """Import names of everything that pyproject.toml declares besides torch and numpy."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + [text for extra in EXTRAS for text in extras[extra]]
    names = [text.split(">")[0].split("<")[0].split("=")[0].strip() for text in declared]
    return [IMPORT_NAMES.get(name, name) for name in names if name not in {"torch", "numpy"}] + ["scipy"]


def test_python_interface_needs_torch_and_numpy_only() -> None:
    code = f"""
        import sys
        hidden = {other_dependencies()!r}
        class Hiding:
            def __init__(self, finder):
                self.finder = finder
            def __getattr__(self, name):
                return getattr(self.finder, name)
            def find_spec(self, name, *rest):
                return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, *rest)
        sys.meta_path[:] = map(Hiding, sys.meta_path)
        import torch, tutti
        from torch.utils.data import TensorDataset

        tutti.init()
        model = torch.nn.Linear(2, 1)
        before = model.weight.clone()
        run = tutti.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            TensorDataset(torch.randn(8, 2), torch.randn(8, 1)),
            lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
            strategy="mirrored",
            workers=2,
            batch_size=4,
        )
        print([run.step(batch) > 0 for batch in run.epoch(0)], tutti.rank(), tutti.size())
        print(torch.equal(model.weight, before), len(run.weights_sha256()))
        tutti.shutdown()
    """
    assert fresh(_dedent(code)) == "[True, True] 0 1\nFalse 64"


def _dedent(code: str) -> str:
    return "\n".join(line[8:] for line in code.splitlines())
