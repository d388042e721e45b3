"""scikit-learn's handwritten digits: 1408 training and 384 test images, in whole batches of 64."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 64


def datasets():
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, train_size=1408, test_size=384, stratify=labels, random_state=0)
    train, test = (
        (torch.tensor(parts[i], dtype=torch.float32) / 16, torch.tensor(parts[i + 2])) for i in (0, 1)
    )
    return TensorDataset(*train), TensorDataset(*test)


def network():
    """Two layers. Replicas may be threads, which share torch's generator: the weights come from one of their own."""
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    drawn = torch.Generator().manual_seed(0)
    for weights in net.parameters():
        nn.init.uniform_(weights, -0.125, 0.125, generator=drawn)
    return net
