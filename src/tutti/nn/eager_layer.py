"""Layers that ``torch.compile`` leaves out."""

from __future__ import annotations

from torch import nn


class EagerLayer(nn.Module):
    """Base class of layers that ``torch.compile`` leaves out, because their forward performs collectives.

    Regions around them are compiled; the layers themselves run eagerly.
    """
