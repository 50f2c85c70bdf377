"""Handwritten digits with tutti: tutti run -np 2 deepspeed_after.py, or torchrun, or python alone."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import tutti

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoints", default="checkpoints")
arguments = parser.parse_args()

BATCH = 96
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)


def score(model, batch):
    inputs, targets = batch
    scores = model(inputs)
    correct = (scores.argmax(dim=1) == targets).sum()
    return nn.functional.cross_entropy(scores, targets, reduction="sum"), len(targets), {"accuracy": correct}


run = tutti.prepare(
    model,
    optimizer,
    training,
    score,
    strategy="sharded:stage=1",
    workers=6,
    batch_size=BATCH,
    clip=1.0,
)
run.restore(arguments.checkpoints)
for epoch in run.epochs(arguments.epochs):
    losses = [run.step(batch) for batch in run.epoch(epoch)]
    seen = run.evaluate(held_out)
    if tutti.rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f}, held out {seen.loss:.6f}", end=", ")
        print(f"accuracy {seen.metrics['accuracy']:.4f} of {seen.samples}")
    run.save(arguments.checkpoints)
