"""Stock DDP as its tutorials write it, for ``peer_jobs.py``: ``torchrun … peer_training.py FOLDER``.

Sixty steps; rank 0 saves every ten with ``torch.save`` and ``os.replace``, which is the careful way; a new start goes
on from there. ``FAULT`` says as JSON what this run's own ranks do: ``{"kind": "kill", "rank": 1, "step": 25}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY = 60, 10
FAULT = json.loads(os.environ.get("FAULT", "{}"))


def strike(model: nn.Module, rank: int, step: int) -> None:
    """What this rank does to itself in the middle of a step: between forward and backward."""
    if (FAULT.get("rank"), FAULT.get("step")) != (rank, step) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    Path(sys.argv[1], "struck").write_text(str(time.time()))
    if FAULT["kind"] == "nan":
        next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[FAULT["kind"]])


def train(folder: Path, rank: int) -> nn.Module:
    """From the checkpoint, where there is one, to the end."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first, file = 0, folder / "checkpoint.pt"
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    last = STEPS - 1 if FAULT.get("kind") == "uneven" and rank == FAULT["rank"] else STEPS
    for step in range(first, last):
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        strike(model, rank, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(FAULT.get("pause", 0))
        if rank == 0:
            with (folder / "steps").open("a") as record:
                record.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step + 1} {time.time()}\n")
        if rank == 0 and (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "checkpoint.tmp")
            os.replace(folder / "checkpoint.tmp", file)
    return model


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT", "1800"))))
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    model = train(folder, rank)
    if rank == 0:
        weights = [parameter.detach() for parameter in model.parameters()]
        finite = all(bool(torch.isfinite(weight).all()) for weight in weights)
        digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()
        (folder / "end").write_text(json.dumps({"finite": finite, "weights": digest}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
