"""Names that other programs give to options of tutti, for the message on an unknown option."""

from __future__ import annotations

_TRAIN = {
    "--optimizer.lr": "--lr --learning-rate",
    "--optimizer.weight_decay": "--weight-decay --wd",
    "--optimizer.momentum": "--momentum",
    "--schedule": "--scheduler --lr-scheduler --lr-scheduler-type",
    "--schedule cosine:warmup=100st": "--warmup --warmup-steps",
    "--batch-size": "--bs --batch --global-batch-size --train-batch-size",
    "--micro-batch": "--accumulate --grad-accum --gradient-accumulation-steps --per-device-train-batch-size",
    "--epochs": "--num-epochs --num-train-epochs --max-epochs",
    "--steps": "--max-steps --iterations --iters",
    "--devices": "-n -np --nproc --nproc-per-node --num-processes --num-proc --gpus --num-gpus --ngpus --world-size",
    "--data-workers": "--num-workers --dataloader-num-workers",
    "--precision bf16": "--bf16 --amp --mixed-precision",
    "--precision fp16": "--fp16",
    "--clip": "--max-grad-norm --clip-grad --grad-clip --gradient-clip-val",
    "--out": "--output --output-dir --save-dir --logdir --log-dir",
    "--data": "--data-dir --data-path --dataset",
    "--model": "--arch --model-name",
    "--resume": "--resume-from --resume-from-checkpoint --ckpt --checkpoint",
    "--checkpoint-every": "--save-every --save-steps --save-interval",
    "--eval-every": "--eval-steps --eval-interval",
    "--until": "--target",
    "--strategy": "--distributed --backend",
    "--reproducible": "--deterministic",
    "--activation-checkpointing": "--gradient-checkpointing",
}
_RUN = {"-np": "-n --n --nproc --nproc-per-node --num-processes --nprocs --gpus --num-gpus --ngpus --world-size"}
_BY_COMMAND = {
    command: {name: option for option, names in table.items() for name in names.split()}
    for command, table in (("train", _TRAIN), ("run", _RUN))
}


def name_here(command: str, option: str) -> str | None:
    """Return tutti's name for an option that other programs call ``option``; None for an unknown name.

    Args:
        command: ``train`` or ``run``.
        option: the option as written, with ``_`` or ``-`` between its words, and with or without ``=value``.

    >>> name_here("train", "--learning_rate=0.1")
    '--optimizer.lr'
    """
    return _BY_COMMAND[command].get(option.split("=")[0].replace("_", "-"))
