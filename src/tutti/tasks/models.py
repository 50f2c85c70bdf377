"""Models of the built-in tasks: ``nn.Sequential``s that can be partitioned into stages between any two children.

No parameter has a gradient that is zero by construction: a convolution has a bias only if no batch norm follows.
No activation works in place: at the start of a stage its input is a leaf, which autograd does not let be overwritten.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from tutti.config.task_config import CnnConfig, CourseConfig, LineConfig, MlpConfig, Resnet18Config


def line_model(config: LineConfig) -> nn.Sequential:
    """Build the model y = w·x + b of the task ``linear``: a linear layer, (samples, 1) → (samples, 1).

    Args:
        config: not read: the model has no options.
    """
    return nn.Sequential(OrderedDict(line=nn.Linear(1, 1)))


def cnn(config: CnnConfig, classes: int) -> nn.Sequential:
    """Build a CNN: grey 8×8 images (samples, 1, 8, 8) → logits (samples, classes).

    Three 3×3 convolutions with ReLU (16, 32 and 32 channels), max pooling after the second, and two linear layers.

    Args:
        config: ``batch_norm`` (whether batch norm follows each convolution) and ``dropout`` (probability that a feature
            is dropped before the last layer).
        classes: number of classes.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (inputs, outputs) in enumerate([(1, 16), (16, 32), (32, 32)], 1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=not config.batch_norm)
        if config.batch_norm:
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{number}"] = nn.ReLU()
        if number == 2:
            layers["pool"] = nn.MaxPool2d(2)
    layers.update(flatten=nn.Flatten(), fc1=nn.Linear(32 * 4 * 4, 64), relu4=nn.ReLU())
    if config.dropout:
        layers["dropout"] = nn.Dropout(config.dropout)
    layers["fc2"] = nn.Linear(64, classes)
    return nn.Sequential(layers)


def mlp(config: MlpConfig, classes: int) -> nn.Sequential:
    """Build an MLP with one hidden layer: grey 8×8 images (samples, 1, 8, 8) → logits (samples, classes).

    Args:
        config: ``hidden`` (number of features of the hidden layer, which has ReLU) and ``dropout`` (probability that a
            hidden feature is dropped).
        classes: number of classes.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), fc1=nn.Linear(64, config.hidden), relu=nn.ReLU()
    )
    if config.dropout:
        layers["dropout"] = nn.Dropout(config.dropout)
    layers["fc2"] = nn.Linear(config.hidden, classes)
    return nn.Sequential(layers)


def course(config: CourseConfig, classes: int) -> nn.Sequential:
    """Build a small residual network: colour images (samples, 3, height, width) → logits (samples, classes).

    A 7×7 convolution, two bottleneck blocks (He et al. 2015, arXiv:1512.03385), average pooling and a linear layer.
    Forward and backward take 74 MFLOP for a 32×32 image. Xavier initialisation (Glorot & Bengio 2010), biases zero.

    Args:
        config: ``batch_norm``, whether batch norm follows each convolution.
        classes: number of classes.
    """
    norm = config.batch_norm
    model = nn.Sequential(
        OrderedDict(
            stem=_conv_norm(3, 64, 7, stride=2, norm=norm),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1),
            block1=Residual(bottleneck(64, 64, 256, stride=1, norm=norm), _conv_norm(64, 256, 1, norm=norm)),
            block2=Residual(
                bottleneck(256, 128, 512, stride=2, norm=norm), _conv_norm(256, 512, 1, stride=2, norm=norm)
            ),
            pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            fc=nn.Linear(512, classes),
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def resnet18(config: Resnet18Config, classes: int) -> nn.Sequential:
    """Build a ResNet-18: colour images (samples, 3, 32, 32) → logits (samples, classes).

    He et al. 2015, arXiv:1512.03385, with the stem that is usual for CIFAR: a 3×3 convolution of stride 1 and no max
    pooling. He initialisation.

    Args:
        config: not read: the model has no options.
        classes: number of classes.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_conv_norm(3, 64, 3, norm=True), relu=nn.ReLU())
    inputs = 64
    for stage, (outputs, stride) in enumerate([(64, 1), (128, 2), (256, 2), (512, 2)], 1):
        layers[f"block{stage}a"] = _basic(inputs, outputs, stride)
        layers[f"block{stage}b"] = _basic(outputs, outputs, 1)
        inputs = outputs
    layers.update(pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), fc=nn.Linear(512, classes))
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class Residual(nn.Module):
    """Residual block: relu(branch(x) + shortcut(x)).

    Args:
        branch: the block's convolutions.
        shortcut: identity, or a projection to the shape of the branch's output.
    """

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(branch(x) + shortcut(x)); the shortcut is the identity, or a projection to the branch's shape.

        Args:
            x: activations (samples, channels, height, width), as the branch and the shortcut take them.

        Returns:
            Activations of the shape of the branch's output.
        """
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


def bottleneck(inputs: int, narrow: int, outputs: int, *, stride: int, norm: bool) -> nn.Sequential:
    """Build the branch of a bottleneck block: 1×1, 3×3 and 1×1 convolutions with ReLU between them.

    He et al. 2015, arXiv:1512.03385, table 1. The first convolution has the stride.

    Args:
        inputs, narrow, outputs: channels of the input, between the convolutions, and of the output.
        stride: stride of the first convolution.
        norm: whether batch norm follows each convolution.

    Returns:
        A module (samples, inputs, height, width) → (samples, outputs, height / stride, width / stride), the last two
        rounded up.
    """
    return nn.Sequential(
        _conv_norm(inputs, narrow, 1, stride=stride, norm=norm),
        nn.ReLU(),
        _conv_norm(narrow, narrow, 3, norm=norm),
        nn.ReLU(),
        _conv_norm(narrow, outputs, 1, norm=norm),
    )


def _basic(inputs: int, outputs: int, stride: int) -> Residual:
    branch = nn.Sequential(
        _conv_norm(inputs, outputs, 3, stride=stride, norm=True), nn.ReLU(), _conv_norm(outputs, outputs, 3, norm=True)
    )
    same = stride == 1 and inputs == outputs
    return Residual(branch, nn.Identity() if same else _conv_norm(inputs, outputs, 1, stride=stride, norm=True))


def _conv_norm(inputs: int, outputs: int, kernel: int, *, stride: int = 1, norm: bool) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=not norm)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs))) if norm else conv
