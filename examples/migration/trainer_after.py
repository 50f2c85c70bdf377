"""Handwritten digits with tutti: tutti run -np 2 trainer_after.py, or torchrun, or python alone."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import tutti

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoints", default="checkpoints")
arguments = parser.parse_args()

BATCH = 96
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)


class Digits(Dataset):
    def __init__(self, first, last):
        self.samples = range(first, last)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {"inputs": images[self.samples[index]], "labels": labels[self.samples[index]]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, inputs, labels):
        scores = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def score(model, batch):
    outputs, count = model(**batch), len(batch["labels"])
    correct = (outputs["logits"].argmax(dim=1) == batch["labels"]).sum()
    return outputs["loss"] * count, count, {"accuracy": correct}


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
run = tutti.prepare(
    model,
    optimizer,
    Digits(0, 1536),
    score,
    workers=6,
    batch_size=BATCH,
    clip=1.0,
    scheduler=scheduler,
)
run.restore(arguments.checkpoints)
for epoch in run.epochs(arguments.epochs):
    losses = [run.step(batch) for batch in run.epoch(epoch)]
    seen = run.evaluate(Digits(1536, 1797))
    if tutti.rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.6f}, held out {seen.loss:.6f}", end=", ")
        print(f"accuracy {seen.metrics['accuracy']:.4f} of {seen.samples}")
    run.save(arguments.checkpoints)
