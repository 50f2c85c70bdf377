"""Handwritten digits with tutti: tutti run -np 2 lightning_after.py, or torchrun, or python alone."""

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


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs):
        return self.layers(inputs)


def score(model, batch):
    inputs, targets = batch
    scores = model(inputs)
    correct = (scores.argmax(dim=1) == targets).sum()
    return nn.functional.cross_entropy(scores, targets, reduction="sum"), len(targets), {"accuracy": correct}


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
run = tutti.prepare(
    model,
    optimizer,
    training,
    score,
    workers=6,
    batch_size=BATCH,
    clip=1.0,
    scheduler=scheduler,
)
run.restore(arguments.checkpoints)
for epoch in run.epochs(arguments.epochs):
    losses = [run.step(batch) for batch in run.epoch(epoch)]
    seen = run.evaluate(held_out)
    if tutti.rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f}, held out {seen.loss:.6f}", end=", ")
        print(f"accuracy {seen.metrics['accuracy']:.4f} of {seen.samples}")
    run.save(arguments.checkpoints)
