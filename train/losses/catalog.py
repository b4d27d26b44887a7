"""The loss of a token that training minimizes. No other module chooses it."""

from train.config import TrainConfig
from train.core.loss.token_loss import CrossEntropy, TokenLoss


def make_loss(train: TrainConfig) -> TokenLoss:
    """Return the loss of a token, from the section `train` of a config."""
    return CrossEntropy(train.z_loss)
