"""A family of models in transformers: what it needs, and how its folders look."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from data.errors import Mistake
from model.config import ModelConfig
from train.errors import as_typed

NOT_NULL = object()  # any value but null


class Family(NamedTuple):
    """A family of models.

    name: the `model_type` in transformers.
    architecture: the class in transformers.
    needs: what fields of `ModelConfig` must be: a value, NOT_NULL, or a function that
        computes the value from the model.
    names: the parameters that each tensor concatenates, by tensor name (names.py).
    settings: a function that returns the settings in config.json.
    compatible_types: other model types whose folders differ only in config.json.
    transposed: whether matrices have the dims [outputs, inputs].
    zero_biases: the ends of names of biases that are written as zeros if a Longhaul
        model lacks them.
    keys: the keys of `model.*` of settings that have another meaning elsewhere.
    length_key: the setting in config.json that holds the maximum row length.
    interleaved: the ends of names of parameters whose last `rope_head_dim` outputs of
        each head are rotated in pairs (2 i, 2 i + 1), and are stored in this order.
    by_key_head: the ends of names of tensors that hold, for each key head of a gated
        delta net, the outputs of all their parameters.
    ahead_names: like `names`, for prediction modules. Empty: the family has none.
    """

    name: str
    architecture: str
    needs: dict[str, Any]
    names: dict[str, list[str]]
    settings: Callable[[ModelConfig], dict[str, Any]]
    compatible_types: tuple[str, ...] = ()
    transposed: bool = True
    zero_biases: tuple[str, ...] = ()
    keys: dict[str, str] = {}  # noqa: RUF012, a default of a NamedTuple
    length_key: str = "max_position_embeddings"
    interleaved: tuple[str, ...] = ()
    by_key_head: tuple[str, ...] = ()
    ahead_names: dict[str, list[str]] = {}  # noqa: RUF012, a default of a NamedTuple

    @property
    def has_single_experts(self) -> bool:
        """Whether each expert has tensors of its own."""
        return any("experts.{}." in name for name in self.names)

    @property
    def embedding_tensor(self) -> str:
        """The name of the embedding's tensor, which has a row for each token."""
        return next(iter(self.names))

    def unmet_needs(self, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Return (model's value, needed value) for each field whose need is not met."""
        unmet = dict[str, tuple[Any, Any]]()
        sizes = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
        for field, need in self.needs.items():
            value = sizes.get(field, attrgetter(field)(model))
            need = need(model) if callable(need) else need
            if value != need and (need is not NOT_NULL or value is None):
                unmet[field] = value, need
        return unmet

    def need_mistakes(self, model: ModelConfig) -> list[Mistake]:
        """Return a mistake for each field that keeps a model out of this family."""
        reason = f"for transformers' {self.name}, the family that fits best; a model "
        reason += "that no family can hold stays in the run's checkpoints"
        needed = {
            field: (value, "set" if need is NOT_NULL else as_typed(need))
            for field, (value, need) in self.unmet_needs(model).items()
        }
        return [
            Mistake(f"model.{field}", value, f"must be {need} {reason}")
            for field, (value, need) in needed.items()
        ]

    def tensors(self) -> dict[str, list[str]]:
        """Return the parameters that each tensor concatenates, by tensor name."""
        return _with_leaves(self.names)

    def module_tensors(self) -> dict[str, list[str]]:
        """Return the tensors of prediction modules, like `tensors`."""
        return _with_leaves(self.ahead_names)


def _with_leaves(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        name.replace("*", leaf): [param.replace("*", leaf) for param in params]
        for name, params in names.items()
        for leaf in (("weight", "bias") if name.endswith("*") else ("",))
    }
