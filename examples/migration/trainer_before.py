"""Handwritten digits with transformers' Trainer: torchrun --nproc-per-node 2 FILE, or tutti run -np 2 FILE"""

import argparse
import os

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--checkpoint", default="trainer")
parser.add_argument("--order", help="file with the order of samples in every epoch, to compare runs")
arguments = parser.parse_args()

BATCH, ACCUMULATE = 96, 2
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


class Ordered(Sampler):
    """The samples in the order of a file."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 1536

    def __iter__(self):
        return iter(np.load(arguments.order)[self.epoch].tolist())


class DigitsTrainer(Trainer):
    def _get_train_sampler(self, *dataset):
        return Ordered() if arguments.order else super()._get_train_sampler(*dataset)


class Report(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **others):
        if state.is_world_process_zero:
            [loss] = [entry["loss"] for entry in state.log_history[-2:] if "loss" in entry]
            print(
                f"epoch {round(state.epoch) - 1}: loss {float(loss):.6f}, held out {metrics['eval_exact']:.6f}",
                end=", ",
            )
            print(f"accuracy {metrics['eval_accuracy']:.4f} of {metrics['eval_samples']}")


def score(prediction):
    scores, targets = torch.tensor(prediction.predictions), torch.tensor(prediction.label_ids)
    accuracy = (scores.argmax(dim=1) == targets).float().mean().item()
    loss = nn.functional.cross_entropy(scores, targets).item()
    return {"exact": loss, "accuracy": accuracy, "samples": len(targets)}


os.makedirs(arguments.checkpoint, exist_ok=True)
torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.8)
trainer = DigitsTrainer(
    model=model,
    args=TrainingArguments(
        output_dir=arguments.checkpoint,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=BATCH // (int(os.environ.get("WORLD_SIZE", 1)) * ACCUMULATE),
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=Digits(0, 1536),
    eval_dataset=Digits(1536, 1797),
    optimizers=(optimizer, scheduler),
    compute_metrics=score,
    callbacks=[Report()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.checkpoint))
