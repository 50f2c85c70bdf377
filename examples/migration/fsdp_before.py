"""Handwritten digits with FSDP2, by hand: torchrun --nproc-per-node 2 fsdp_before.py"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="fsdp")
parser.add_argument("--order", help="file with the order of samples in every epoch, to compare runs")
arguments = parser.parse_args()

BATCH, ACCUMULATE = 96, 2
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)

start = 0
if os.path.exists(arguments.checkpoint):
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "epoch": 0}
    load(saved, checkpoint_id=arguments.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scheduler.load_state_dict(saved["scheduler"])
    start = saved["epoch"]

per_rank = BATCH // (world_size * ACCUMULATE)
sampler = DistributedSampler(training, shuffle=True, seed=0)
loader = DataLoader(training, batch_size=per_rank, sampler=sampler)
held_out_loader = DataLoader(held_out, batch_size=256, sampler=DistributedSampler(held_out, shuffle=False))

for epoch in range(start, arguments.epochs):
    sampler.set_epoch(epoch)
    if arguments.order:
        ordered = Subset(training, np.load(arguments.order)[epoch].tolist())
        loader = DataLoader(ordered, batch_size=per_rank, sampler=DistributedSampler(ordered, shuffle=False))
    model.train()
    total = torch.zeros(2)
    for index, (inputs, targets) in enumerate(loader):
        last = (index + 1) % ACCUMULATE == 0
        model.set_requires_gradient_sync(last)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss / ACCUMULATE).backward()
        total += torch.tensor([loss.item() * len(targets), len(targets)])
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    dist.all_reduce(total)

    model.eval()
    seen = torch.zeros(3)
    with torch.no_grad():
        for inputs, targets in held_out_loader:
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, targets, reduction="sum")
            correct = (scores.argmax(dim=1) == targets).sum()
            seen += torch.tensor([loss.item(), correct.item(), len(targets)])
    dist.all_reduce(seen)
    if rank == 0:
        print(f"epoch {epoch}: loss {total[0] / total[1]:.6f}", end=", ")
        print(f"held out {seen[0] / seen[2]:.6f}, accuracy {seen[1] / seen[2]:.4f} of {seen[2]:.0f}")
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}
    save(saved, checkpoint_id=arguments.checkpoint)

dist.destroy_process_group()
