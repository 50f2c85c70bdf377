"""Handwritten digits with tutti: tutti run -np 2 accelerate_after.py, or torchrun, or python alone."""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import tutti

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoints", default="checkpoints")
arguments = parser.parse_args()

BATCH, SAVE_EVERY = 96, 10
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)


def score(model, batch):
    inputs, targets = batch
    scores = model(inputs)
    correct = (scores.argmax(dim=1) == targets).sum()
    return nn.functional.cross_entropy(scores, targets, reduction="sum"), len(targets), {"accuracy": correct}


run = tutti.prepare(model, optimizer, training, workers=6, batch_size=BATCH, clip=1.0)
sums = [0.0, 0.0]
saved = run.restore(arguments.checkpoints)
if saved:
    scheduler.load_state_dict(saved["scheduler"])
    sums = saved["sums"]


def save():
    run.save(arguments.checkpoints, {"scheduler": scheduler.state_dict(), "sums": sums})


with run.stopping() as reason:
    for epoch in run.epochs(arguments.epochs):
        model.train()
        for inputs, targets in run.microbatches(epoch):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if run.stepped:
                scheduler.step()
                sums = [sums[0] + run.stats.loss * run.stats.count, sums[1] + run.stats.count]
                if run.stats.stop or run.global_step % SAVE_EVERY == 0:
                    save()
                if run.stats.stop:
                    sys.exit(reason.exit_code)

        seen = run.evaluate(held_out, loss=score)
        if tutti.rank() == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.6f}", end=", ")
            print(f"held out {seen.loss:.6f}, accuracy {seen.metrics['accuracy']:.4f} of {seen.samples}")
        sums = [0.0, 0.0]
        save()
