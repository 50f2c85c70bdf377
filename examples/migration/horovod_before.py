"""Handwritten digits with Horovod: horovodrun -np 2 python horovod_before.py, or tutti run --horovod -np 2 FILE"""

import argparse
import os

import horovod.torch as hvd
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="horovod.pt")
parser.add_argument("--order", help="file with the order of samples in every epoch, to compare runs")
arguments = parser.parse_args()

BATCH, ACCUMULATE = 96, 2
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])

hvd.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

start = 0
if hvd.rank() == 0 and os.path.exists(arguments.checkpoint):
    saved = torch.load(arguments.checkpoint, map_location="cpu")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"]
start = hvd.broadcast_object(start, root_rank=0)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=ACCUMULATE
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8, last_epoch=start * 16 - 1)

shard = {"num_replicas": hvd.size(), "rank": hvd.rank()}
per_rank = BATCH // (hvd.size() * ACCUMULATE)
sampler = DistributedSampler(training, shuffle=True, seed=0, **shard)
loader = DataLoader(training, batch_size=per_rank, sampler=sampler)
held_out_loader = DataLoader(held_out, batch_size=256, sampler=DistributedSampler(held_out, shuffle=False, **shard))

for epoch in range(start, arguments.epochs):
    sampler.set_epoch(epoch)
    if arguments.order:
        ordered = Subset(training, np.load(arguments.order)[epoch].tolist())
        loader = DataLoader(ordered, batch_size=per_rank, sampler=DistributedSampler(ordered, shuffle=False, **shard))
    model.train()
    total = torch.zeros(2)
    for index, (inputs, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss / ACCUMULATE).backward()
        total += torch.tensor([loss.item() * len(targets), len(targets)])
        if (index + 1) % ACCUMULATE == 0:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    total = hvd.allreduce(total, op=hvd.Sum, name="training")

    model.eval()
    seen = torch.zeros(3)
    with torch.no_grad():
        for inputs, targets in held_out_loader:
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, targets, reduction="sum")
            correct = (scores.argmax(dim=1) == targets).sum()
            seen += torch.tensor([loss.item(), correct.item(), len(targets)])
    seen = hvd.allreduce(seen, op=hvd.Sum, name="held out")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {total[0] / total[1]:.6f}", end=", ")
        print(f"held out {seen[0] / seen[2]:.6f}, accuracy {seen[1] / seen[2]:.4f} of {seen[2]:.0f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, arguments.checkpoint)
