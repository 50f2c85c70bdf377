"""Handwritten digits with DeepSpeed: deepspeed --num_gpus 2 FILE, torchrun, or tutti run -np 2 FILE"""

import argparse
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="deepspeed")
parser.add_argument("--order", help="file with the order of samples in every epoch, to compare runs")
arguments = parser.parse_args()

BATCH, ACCUMULATE = 96, 2
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])

deepspeed.init_distributed("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
config = str(Path(__file__).with_name("ds_config.json"))
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
folder, state = engine.load_checkpoint(arguments.checkpoint)
start = state["epoch"] if folder else 0

per_rank = BATCH // (world_size * ACCUMULATE)
sampler = DistributedSampler(training, shuffle=True, seed=0)
loader = DataLoader(training, batch_size=per_rank, sampler=sampler)
held_out_loader = DataLoader(held_out, batch_size=256, sampler=DistributedSampler(held_out, shuffle=False))

for epoch in range(start, arguments.epochs):
    sampler.set_epoch(epoch)
    if arguments.order:
        ordered = Subset(training, np.load(arguments.order)[epoch].tolist())
        loader = DataLoader(ordered, batch_size=per_rank, sampler=DistributedSampler(ordered, shuffle=False))
    engine.train()
    total = torch.zeros(2)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        total += torch.tensor([loss.item() * len(targets), len(targets)])
    dist.all_reduce(total)

    engine.eval()
    seen = torch.zeros(3)
    with torch.no_grad():
        for inputs, targets in held_out_loader:
            scores = engine(inputs)
            loss = nn.functional.cross_entropy(scores, targets, reduction="sum")
            correct = (scores.argmax(dim=1) == targets).sum()
            seen += torch.tensor([loss.item(), correct.item(), len(targets)])
    dist.all_reduce(seen)
    if rank == 0:
        print(f"epoch {epoch}: loss {total[0] / total[1]:.6f}", end=", ")
        print(f"held out {seen[0] / seen[2]:.6f}, accuracy {seen[1] / seen[2]:.4f} of {seen[2]:.0f}")
    engine.save_checkpoint(arguments.checkpoint, client_state={"epoch": epoch + 1})
