"""The networks of published tables, as `model = "paper.networks:NAME"` of an experiment file."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def pfllib_cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """PFLlib's CNN for 28 x 28 images: 582,026 parameters for one channel and ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU()),
        nn.Linear(512, classes),
    )


def fedbn_digits(shape: Sequence[int], classes: int) -> nn.Module:
    """FedBN's network for digits: three convolutions and three linear layers, all but the last with BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(128 * 7 * 7, 2048), nn.BatchNorm1d(2048), nn.ReLU()),
        *(nn.Linear(2048, 512), nn.BatchNorm1d(512), nn.ReLU()),
        nn.Linear(512, classes),
    )


def small_alexnet(shape: Sequence[int], classes: int) -> nn.Module:
    """AlexNet's five convolutions with BatchNorm for 64 x 64 images; its first stride is 2, its linear layers smaller.

    FedBN's AlexNet takes 256 x 256 images with a first stride of 4 and has linear layers of 4,096 units.
    """
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 11, stride=2, padding=5), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.BatchNorm2d(192), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.BatchNorm2d(384), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(256 * 3 * 3, 1024), nn.BatchNorm1d(1024), nn.ReLU()),
        *(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.ReLU()),
        nn.Linear(1024, classes),
    )
