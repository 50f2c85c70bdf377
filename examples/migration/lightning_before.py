"""Handwritten digits with Lightning: torchrun --nproc-per-node 2 lightning_before.py, or tutti run -np 2 FILE"""

import argparse
import os

import lightning
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="lightning")
parser.add_argument("--order", help="file with the order of samples in every epoch, to compare runs")
arguments = parser.parse_args()

BATCH, ACCUMULATE = 96, 2
digits = load_digits()
images = torch.from_numpy(digits.data / 16).float()
labels = torch.from_numpy(digits.target)
training = TensorDataset(images[:1536], labels[:1536])
held_out = TensorDataset(images[1536:], labels[1536:])
world_size = int(os.environ.get("WORLD_SIZE", 1))


class Ordered(DistributedSampler):
    """The samples in the order of a file, if there is one."""

    def __iter__(self):
        if not arguments.order:
            return super().__iter__()
        return iter(np.load(arguments.order)[self.epoch][self.rank :: self.num_replicas].tolist())


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.sums = {"training": torch.zeros(3), "held out": torch.zeros(3)}

    def score(self, batch, part):
        inputs, targets = batch
        scores = self.layers(inputs)
        loss = nn.functional.cross_entropy(scores, targets)
        correct = (scores.argmax(dim=1) == targets).sum()
        self.sums[part] += torch.tensor([loss.item() * len(targets), correct, len(targets)])
        return loss

    def training_step(self, batch):
        return self.score(batch, "training")

    def validation_step(self, batch):
        self.score(batch, "held out")

    def on_train_epoch_end(self):
        total, seen = (self.trainer.strategy.reduce(sums, reduce_op="sum") for sums in self.sums.values())
        self.sums = {part: torch.zeros(3) for part in self.sums}
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}: loss {total[0] / total[2]:.6f}", end=", ")
            print(f"held out {seen[0] / seen[2]:.6f}, accuracy {seen[1] / seen[2]:.4f} of {seen[2]:.0f}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


torch.manual_seed(0)
model = Classifier()
shard = {"num_replicas": world_size, "rank": int(os.environ.get("RANK", 0))}
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp" if world_size > 1 else "auto",
    devices=world_size,
    max_epochs=arguments.epochs,
    accumulate_grad_batches=ACCUMULATE,
    gradient_clip_val=1.0,
    use_distributed_sampler=False,
    num_sanity_val_steps=0,
    default_root_dir=arguments.checkpoint,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
per_rank = BATCH // (world_size * ACCUMULATE)
trainer.fit(
    model,
    DataLoader(training, batch_size=per_rank, sampler=Ordered(training, **shard)),
    DataLoader(held_out, batch_size=256, sampler=DistributedSampler(held_out, shuffle=False, **shard)),
    ckpt_path="last",
)
