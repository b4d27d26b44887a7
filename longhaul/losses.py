"""Building blocks for a user's losses. This module imports JAX."""

from train.core.loss.token_loss import LogitFactors as LogitFactors
from train.core.loss.token_loss import TokenLoss as TokenLoss
from train.core.loss.token_loss import Tokens as Tokens
from train.losses.derived import DerivedLoss as DerivedLoss
