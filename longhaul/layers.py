"""Building blocks for a user's mixers and MLPs. This module imports JAX."""

from model.attention.cache import MixerCache as MixerCache
from model.config import ModelConfig as ModelConfig
from model.execution import CallContext as CallContext
from model.execution import Execution as Execution
from model.layers import MLP as MLP
from model.layers import Normalize as Normalize
from model.layers import SelfAttention as SelfAttention
from model.layers import stds as stds
from model.linear import Linear as Linear
from model.params import Kind as Kind
from model.params import ParamInfo as ParamInfo
from model.parts.context.row_pieces import row_pieces as row_pieces
from model.parts.delta.convolution import convolve as convolve
from model.remat import saveable as saveable
from model.scopes import part_scope as part_scope
