"""The loss of a token that training minimizes. No other module chooses it."""

from train.config import TrainConfig
from train.core.loss.token_loss import CrossEntropy, TokenLoss
from train.own_parts import chosen_part


def make_loss(train: TrainConfig) -> TokenLoss:
    """Return the loss of a token, from the section `train` of a config."""
    own = chosen_part(train, "loss")
    if own is not None:
        return own.part.make(own.values)
    return CrossEntropy(train.z_loss)
