"""CIFAR-10 (Krizhevsky 2009), or any classes of 32×32 colour images in the same folder layouts."""

from __future__ import annotations

from functools import partial

from tutti.config.task_config import CourseConfig, Resnet18Config
from tutti.data import images
from tutti.data.arrays import ArraySource, CropFlip
from tutti.tasks import losses, models
from tutti.tasks.task import Task

SIZE = 32
"""Height and width of an image, in pixels."""
HUB = "uoft-cs/cifar10"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Mean and standard deviation of the 50,000 training images, by channel.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def cifar10_task(config: CourseConfig | Resnet18Config, data: str, augment: bool) -> Task:
    """Build the task of classifying CIFAR-10 images; they are normalised by CIFAR-10's mean and standard deviation.

    A batch is images (samples, 3, 32, 32) float32 and labels (samples,) int64; the loss is the cross-entropy. The call
    reads and decodes all images into memory.

    Args:
        config: options of the model, whose class selects it: a small residual network or a ResNet-18.
        data: a folder of parquet files as on the Hugging Face hub, or of image files ``train/CLASS/*.png``; or
            ``uoft-cs/cifar10``, the name of the data set on the hub, which the package ``datasets`` loads.
        augment: whether to randomly crop (border of 4 pixels) and mirror the training images.

    Returns:
        A ``Task`` with the attributes ``model`` (a function without arguments that returns a new model), ``loss`` (the
        loss function), ``train`` (training samples) and ``eval`` (held-out samples).

    Raises:
        DataError: the data are missing or empty, an image is broken or not 32×32, or a label is out of range.
    """
    splits = images.find_images(data, classes=CLASSES, hub=HUB)
    classes = splits[0].classes
    (train, train_labels), (held_out, held_out_labels) = (images.read_images(split, SIZE) for split in splits)
    model = (
        partial(models.course, config, len(classes))
        if isinstance(config, CourseConfig)
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
