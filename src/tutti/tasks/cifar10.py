"""CIFAR-10 (Krizhevsky 2009), or any other classes of 32×32 colour images in the same layouts."""

from __future__ import annotations

from functools import partial

from tutti.data import images
from tutti.data.arrays import ArraySource, CropFlip
from tutti.tasks import losses, models
from tutti.tasks.config import Course, Resnet18
from tutti.tasks.task import Task

SIZE = 32
HUB = "uoft-cs/cifar10"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of the 50,000 training images, by channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def task(config: Course | Resnet18, data: str, augment: bool) -> Task:
    """Images normalised by CIFAR-10's mean and standard deviation.

    Args:
        config: the model.
        data: a folder in hub layout or of image files, or ``uoft-cs/cifar10``.
        augment: crop with a border of 4 and mirror the training images.

    Raises:
        DataError: no such data, a broken image, another size, a label out of range, an empty set.
    """
    splits = images.find(data, classes=CLASSES, hub=HUB)
    classes = splits[0].classes
    (train, train_labels), (held_out, held_out_labels) = (images.read(split, SIZE) for split in splits)
    model = (
        partial(models.course, config, len(classes))
        if isinstance(config, Course)
        else partial(models.resnet18, config, len(classes))
    )
    return Task(
        name="cifar10",
        model=model,
        loss=losses.classification,
        train=ArraySource(train, train_labels, mean=MEAN, std=STD, augment=CropFlip(pad=4) if augment else None),
        eval=ArraySource(held_out, held_out_labels, mean=MEAN, std=STD),
        images=True,
        describe=f"{len(train):,} + {len(held_out):,} images {SIZE}×{SIZE}, {len(classes)} classes",
    )
