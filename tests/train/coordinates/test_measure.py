"""Models are resized before their activations are compared."""

from tests.train.conftest import Configure
from train.coordinates.measure import ModelFamily


def test_the_number_of_heads_grows_with_the_width(configure: Configure):
    """Heads keep their dims, even if they are not embed_dim / num_heads."""
    family = ModelFamily(configure(["model=qwen3_nano"]))
    model = family.config.model
    assert model.head_size != model.embed_dim // model.num_heads
    assert family.resized(model.embed_dim, 2).model == model
    large = family.resized(4 * model.embed_dim, 8).model
    assert (large.embed_dim, large.num_layers) == (4 * model.embed_dim, 8)
    assert large.head_size == model.head_size
    assert large.num_heads == 4 * model.num_heads
    assert large.kv_heads == 4 * model.kv_heads
