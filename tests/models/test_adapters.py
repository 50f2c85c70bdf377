"""LoRA adapters of peft, trained over ranks: saved alone, merged, and begun with; skipped without the packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.models import zoo

WORDS = torch.arange(1, 25).view(4, 6) % 9


TARGETS = {"Llama": ["q_proj", "down_proj"], "GPT-2": ["c_attn", "c_fc"]}
"""Layers with adapters; those of GPT-2 have the transposes of linear layers' weights."""


def base(name: str) -> nn.Module:
    torch.manual_seed(3)
    return zoo.build(name)


def adapted(name: str) -> Any:
    import peft

    torch.manual_seed(4)
    transposed = name == "GPT-2"
    config = peft.LoraConfig(r=2, target_modules=TARGETS[name], init_lora_weights=False, fan_in_fan_out=transposed)
    return peft.get_peft_model(base(name), config)  # type: ignore[arg-type]


def loss(model: Any, batch: tuple[Tensor]) -> Any:
    return model(input_ids=batch[0], labels=batch[0]).loss


def tune(name: str, strategy: str, folder: str, init_from: str | None = None) -> Any:
    """Train the adapters, and save them as docs/checkpoints.md says."""
    model = adapted(name)
    options = {"strategy": strategy, "workers": 1, "batch_size": 4, "micro_batch": 2, "precision": "fp64"}
    options |= {"init_from": init_from, "init_map": "new=*"} if init_from else {}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run = tutti.prepare(model, optimizer, torch.utils.data.TensorDataset(WORDS), loss, **options)  # type: ignore[arg-type]
    if init_from is None:
        for epoch in range(2):
            run.step(next(run.epoch(epoch)))
    state = run.state()
    if tutti.rank() == 0 and folder:
        model.save_pretrained(folder, state_dict=state)
    return {key: tensor.cpu().numpy().copy() for key, tensor in state.items()}


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "strategy", "devices"), [("Llama", "sharded", 2), ("Llama", "pipeline", 2), ("GPT-2", "tensor", 2)]
)
def test_adapters_are_saved_alone_merged_and_begun_with(name: str, strategy: str, devices: int, tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package)
    import peft
    from safetensors.torch import save_file

    [want] = worlds.run(1, tune, name=name, strategy="single", folder="")
    state = worlds.run(devices, tune, name=name, strategy=strategy, folder=str(tmp_path / "adapter"))[0]
    assert max(abs(state[key] - want[key]).max() for key in want) <= 1e-10
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    # Alone: peft puts the adapters on the base model again.
    whole = adapted(name)
    whole.load_state_dict({key: torch.from_numpy(array) for key, array in state.items()})
    again = peft.PeftModel.from_pretrained(base(name), str(tmp_path / "adapter"))
    scores = whole.eval()(input_ids=WORDS).logits
    assert torch.allclose(again.eval()(input_ids=WORDS).logits, scores, rtol=0, atol=1e-12)
    # Merged: the plain model.
    merged = again.merge_and_unload()  # type: ignore[operator]
    assert merged.state_dict().keys() == base(name).state_dict().keys()
    assert torch.allclose(merged(input_ids=WORDS).logits, scores, rtol=0, atol=1e-12)
    # Begun with: the other weights are those of the base model.
    adapters = {key: torch.from_numpy(array) for key, array in state.items() if "lora_" in key}
    save_file(adapters, tmp_path / "lora.safetensors")
    begun = worlds.run(
        devices, tune, name=name, strategy=strategy, folder="", init_from=str(tmp_path / "lora.safetensors")
    )[0]
    assert all((begun[key] == state[key]).all() for key in state)
