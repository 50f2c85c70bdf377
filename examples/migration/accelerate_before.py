"""Handwritten digits with accelerate: accelerate launch --num_processes 2 accelerate_before.py"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", type=Path, default=Path("accelerate"))
parser.add_argument("--order", help="file with the order of samples in every epoch, to compare runs")
arguments = parser.parse_args()

BATCH, ACCUMULATE, SAVE_EVERY = 96, 2, 10
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=ACCUMULATE,
    dataloader_config=DataLoaderConfiguration(split_batches=True),
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
loader = DataLoader(training, batch_size=BATCH // ACCUMULATE, shuffle=True)
model, optimizer, scheduler, loader, held_out_loader = accelerator.prepare(
    model, optimizer, scheduler, loader, DataLoader(held_out, batch_size=240)
)

progress = {"epoch": 0, "batch": 0}
if (arguments.checkpoint / "progress.json").exists():
    accelerator.load_state(arguments.checkpoint)
    progress = json.loads((arguments.checkpoint / "progress.json").read_text())


def save(epoch, batch):
    accelerator.save_state(arguments.checkpoint)
    if accelerator.is_main_process:
        (arguments.checkpoint / "progress.json").write_text(json.dumps({"epoch": epoch, "batch": batch}))


for epoch in range(progress["epoch"], arguments.epochs):
    if arguments.order:
        ordered = Subset(training, np.load(arguments.order)[epoch].tolist())
        loader = accelerator.prepare(DataLoader(ordered, batch_size=BATCH // ACCUMULATE))
    elif hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    done = progress["batch"] if epoch == progress["epoch"] else 0
    left = accelerator.skip_first_batches(loader, done) if done else loader
    model.train()
    losses = []
    for index, (inputs, targets) in enumerate(left, done + 1):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        if index % (SAVE_EVERY * ACCUMULATE) == 0:
            save(epoch, index)

    model.eval()
    loss_sum = correct = count = 0
    for inputs, targets in held_out_loader:
        with torch.no_grad():
            scores = model(inputs)
        scores, targets = accelerator.gather_for_metrics((scores, targets))
        loss_sum += nn.functional.cross_entropy(scores, targets, reduction="sum").item()
        correct += (scores.argmax(dim=1) == targets).sum().item()
        count += len(targets)
    accelerator.print(f"epoch {epoch}: loss {torch.stack(losses).mean():.6f}", end=", ")
    accelerator.print(f"held out {loss_sum / count:.6f}, accuracy {correct / count:.4f} of {count}")
    save(epoch + 1, 0)

accelerator.end_training()
