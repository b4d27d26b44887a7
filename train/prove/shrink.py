"""Shrink a run's config until virtual CPU devices compute its step in seconds.

Every switch stays: norms, windows, patterns, rematerialisation, accumulation, packing,
the optimizer and so on. Sizes become small, and mesh axes become two devices, or four
where two devices could hide a wrong direction. A size shrinks to the first of its
candidates with which the config breaks no rule. A key without candidates stays as it
is.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from model.choices import Attention, ComputeDtype, Dtype, Mlp
from model.config import ModelConfig
from train.cli.rules import config_mistakes
from train.config import MESH_AXES, Config, DcnConfig
from train.errors import ConfigError, Mistake
from train.execution import batch_shards, choose_execution
from train.identity import flatten
from train.mesh import Device
from train.mesh_sizes import mesh_mistakes, pipeline_of
from train.sharding import axis_rules

MAX_DEVICES = 8
_LENGTH, _LARGE_VOCAB = 64, 96  # the length of a row, and ids that exceed its tokens
# The axes that are left out first if their product exceeds MAX_DEVICES.
_DISPENSABLE = ("data", "fsdp", "tensor", "expert", "context", "pipeline")
# The axes whose devices form a ring or a line: two of them have only one neighbour.
_DIRECTED = ("context", "pipeline")

Changes = dict[str, Any]  # Values by their full key.

# The small value of each size that depends on no other. A size that this value does not
# suit becomes two, four or eight times as large.
SIZES = {
    "model.embed_dim": 32,
    "model.mlp_dim": 48,
    "model.expert_dim": 24,
    "model.shared_experts": 1,
    "model.query_scale_dim": 12,
}


class Shrunk(NamedTuple):
    """A small config, the keys that differ, and sentences about what it leaves out."""

    config: Config
    changes: dict[str, tuple[Any, Any]]
    left_out: list[str]


def shrink(config: Config, device: Device) -> Shrunk:
    """Return a small config with the same switches, for virtual devices of a CPU.

    Args:
        config: the run's config, with its vocabulary size set (`settle`).
        device: one of the CPU's devices.

    Raises:
        ConfigError: if the reduced mesh does not divide the run's dims.
    """
    small = with_changes(config, _fixed_choices(config))
    small = with_changes(small, _axis_sizes(config))
    for step in (_row_candidates, _depth_candidates, _head_candidates):
        small = _first_valid(small, step(config, small), device)
    for key, size in SIZES.items():
        value = value_of(small, key)
        sizes = [size * factor for factor in (1, 2, 4, 8)]
        smaller = [{key: n} for n in sizes if value is not None and n < value]
        small = _first_valid(small, smaller, device)
    for step in (_expert_candidates, _vocab_candidates):
        small = _first_valid(small, step(config, small), device)
    if mistakes := _mistakes(small, device):
        raise ConfigError(mistakes)
    old, new = flatten(config), flatten(small)
    changes = {key: (old.get(key), new[key]) for key in new if old.get(key) != new[key]}
    return Shrunk(small, changes, _left_out(config, small))


def value_of(config: Config, key: str) -> Any:
    """Return the value of a key such as `model.embed_dim`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a config with other values of some keys such as `model.embed_dim`."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        part: Any = getattr(config, section)
        config = replace(config, **{section: replace(part, **{name: value})})
    return config


def without_axes(config: Config, axes: Iterable[str]) -> Config:
    """Return the config with one device along each of these mesh axes."""
    ones = dict.fromkeys(axes, 1)
    changes = {f"mesh.{axis}": 1 for axis in ones}
    return with_changes(
        config, changes | {"mesh.dcn": replace(config.mesh.dcn, **ones)}
    )


def mesh_of(config: Config) -> dict[str, int]:
    """Return the mesh axes of more than one device and their sizes."""
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    return {axis: size for axis, size in sizes.items() if size != 1}


def _fixed_choices(config: Config) -> Changes:
    """Return what no run on a CPU in float32 can have, and a schedule that moves."""
    changes: Changes = {
        "model.compute_dtype": ComputeDtype.float32,
        "model.param_dtype": Dtype.float32,
        "model.high_precision_layers": (),
        "schedule.warmup_steps": 0,
    }
    if config.model.attention is not Attention.auto:
        changes["model.attention"] = Attention.xla
    if config.mesh.pipeline != 1:
        # This loss depends on the other rows of a microbatch, and microbatches of
        # stages have fewer rows.
        changes["model.router_aux_weight"] = 0.0
    return changes


def _axis_sizes(config: Config) -> Changes:
    """Return the size of each mesh axis, and its factor across slices."""
    full = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    sizes = {axis: _smallest_factor(size) for axis, size in full.items()}
    for axis in _DISPENSABLE:
        if math.prod(sizes.values()) > MAX_DEVICES:
            sizes[axis] = 1
    for axis in _DIRECTED:
        has_room = 2 * math.prod(sizes.values()) <= MAX_DEVICES
        if has_room and sizes[axis] == 2 and full[axis] > 0 and full[axis] % 4 == 0:
            sizes[axis] = 4
    factors = {a: math.gcd(getattr(config.mesh.dcn, a), n) for a, n in sizes.items()}
    changes: Changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
    repeats = min(config.mesh.pipeline_repeats, 2)
    return changes | {
        "mesh.dcn": DcnConfig(**factors),
        "mesh.pipeline_repeats": repeats,
    }


def _smallest_factor(size: int) -> int:
    """Return the smallest prime factor; 1 for 1, and 2 for -1 (unknown)."""
    if size == -1:
        return 2
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def _row_candidates(config: Config, small: Config) -> Iterable[Changes]:
    """Yield lengths of rows, with two rows of a microbatch on each device."""
    length, sizes = config.data.sequence_length, dict.fromkeys(MESH_AXES, 1)
    shards = batch_shards(axis_rules(small.mesh), sizes | mesh_of(small)).rows
    accumulation = min(config.train.accumulation_steps, 2)
    microbatches, stages = config.train.pipeline_microbatches, small.mesh.pipeline
    rounds = 1
    if microbatches is not None:
        rounds = 2 if microbatches > max(1, config.mesh.pipeline) else 1
        microbatches = rounds * stages
    chunk = config.train.loss_chunk_tokens
    if chunk is None and (config.model.vocab_size or 0) >= 8192:
        chunk = length // 4  # `auto` divides the logits of so many ids.
    for small_length in (_LENGTH, 2 * _LENGTH, 4 * _LENGTH):
        if small_length > length:
            return

        def scale(value: int | None, least: int, full: int = small_length) -> Any:
            return value and max(least, value * full // length)

        yield {
            "data.sequence_length": small_length,
            "data.batch_size": 2 * shards * accumulation * rounds,
            "train.accumulation_steps": accumulation,
            "train.pipeline_microbatches": microbatches,
            "train.loss_chunk_tokens": scale(chunk, small_length // 8),
            "model.window": scale(config.model.window, 3),
            "model.max_sequence_length": config.model.max_sequence_length
            and small_length,
        }


def _depth_candidates(config: Config, small: Config) -> Iterable[Changes]:
    """Yield the depth of two repeats of the layer pattern, and then more."""
    model = config.model
    stages, repeats, _ = pipeline_of(small, small.mesh.pipeline)
    groups = stages * repeats
    dense = min(model.layers_before_experts, groups)
    for repeat in (2, 3, 4):
        period = math.lcm(layer_period(model), groups)
        depth = dense + max(period, repeat * layer_period(model))
        if depth < model.num_layers:
            yield {"model.dense_layers": dense, "model.num_layers": depth}
    yield {"model.num_layers": model.num_layers}


def layer_period(model: ModelConfig) -> int:
    """Return the number of layers after which the kinds of layers repeat."""
    experts_every = model.experts_every if model.expert_layers else 1
    return math.lcm(len(model.layer_pattern or "1"), experts_every)


def _head_candidates(config: Config, small: Config) -> Iterable[Changes]:
    """Yield numbers of heads, with the run's ratio of query heads to key heads."""
    model = config.model
    ratio = model.num_heads // model.kv_heads
    head_dim = min(model.head_size, 8 if model.rotary_fraction >= 0.25 else 32)
    for ratio_limit in (8, ratio):
        for kv_heads in (1, 2, 4, 8, 16):
            is_least = kv_heads == min(2, model.kv_heads)
            if kv_heads <= model.kv_heads and (kv_heads > 2 or is_least):
                heads = kv_heads * min(ratio, ratio_limit)
                yield {
                    "model.head_dim": head_dim,
                    "model.num_heads": heads,
                    "model.num_kv_heads": model.num_kv_heads and kv_heads,
                }
    yield {"model.head_dim": model.head_size}


def _expert_candidates(config: Config, small: Config) -> Iterable[Changes]:
    """Yield numbers of experts, with the run's ratio to those of a token if small."""
    model = config.model
    if model.mlp is not Mlp.moe:
        return
    used = min(model.experts_per_token, 2)
    ratio = model.num_experts // model.experts_per_token
    for experts in (used * min(ratio, 8), 4, 8, 16, 32, model.num_experts):
        if experts >= used:
            changes: Changes = {"model.num_experts": experts}
            yield changes | {"model.experts_per_token": used}
            yield changes


def _vocab_candidates(config: Config, small: Config) -> Iterable[Changes]:
    """Yield vocabularies that are as before smaller or larger than a device's tokens.

    Devices exchange rows of a table that has more ids than they have tokens.
    """
    if _has_more_ids(config):
        yield {"model.vocab_size": _LARGE_VOCAB}
    yield {"model.vocab_size": 24}
    yield {"model.vocab_size": 48}
    yield {"model.vocab_size": _LARGE_VOCAB}


def _has_more_ids(config: Config) -> bool:
    """Return whether the vocabulary has more ids than a device's microbatch tokens."""
    sizes = dict.fromkeys(MESH_AXES, 1)
    sizes |= {axis: max(2, size) for axis, size in mesh_of(config).items()}
    shards = batch_shards(axis_rules(config.mesh), sizes)
    data, microbatches = config.data, config.train.accumulation_steps
    parts = microbatches * shards.rows * shards.sequence
    return data.batch_size * data.sequence_length // parts < config.model.vocab_rows


def _first_valid(
    config: Config, candidates: Iterable[Changes], device: Device
) -> Config:
    """Return the config with the first changes that break no rule, or unchanged."""
    for changes in candidates:
        candidate = with_changes(config, changes)
        if not _mistakes(candidate, device):
            return candidate
    return config


def _mistakes(config: Config, device: Device) -> list[Mistake]:
    """Return every rule that a config breaks on its mesh of virtual devices."""
    sizes = dict.fromkeys(MESH_AXES, 1) | mesh_of(config)
    mistakes = config_mistakes(config)
    mistakes = mistakes or mesh_mistakes(config, math.prod(sizes.values()))
    if not mistakes:
        try:
            choose_execution(config, device, sizes)
        except ConfigError as error:
            return error.mistakes
    return mistakes


def _left_out(config: Config, small: Config) -> list[str]:
    """Return sentences about what a proof on a CPU does not cover."""
    sentences = [
        "Attention and experts run XLA's plain kernels, in float32, and not those of "
        "an accelerator."
    ]
    full, reduced = mesh_of(config), mesh_of(small)
    for axis in (axis for axis in full if axis not in reduced):
        sentences.append(
            f"mesh.{axis} has one device, because there are only {MAX_DEVICES} virtual "
            f"devices. To include it, set another axis to 1."
        )
    if config.model.router_aux_weight != small.model.router_aux_weight:
        sentences.append(
            "model.router_aux_weight is 0, because the stages of a pipeline balance "
            "experts over smaller microbatches than one device does."
        )
    if config.init_from is not None:
        sentences.append("The weights are random, and not those of init_from.")
    return sentences
