"""Shrink a run's config until virtual CPU devices compute its step in seconds.

Every switch stays: norms, windows, rematerialisation, accumulation, the optimizer and
so on. Sizes become small, and mesh axes become two devices, or four where two could
hide a wrong direction. Each size shrinks to the first of its candidates with which the
config breaks no rule. A key without candidates stays as it is.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from data.errors import Mistake
from model.choices import Attention, ComputeDtype, Dtype
from model.config import ModelConfig
from model.mixer_catalog import sized_kinds
from train.cli.rules import config_mistakes
from train.config import Config, DcnConfig, MeshConfig, TrainConfig
from train.core.layout import batch_shards
from train.errors import ConfigError
from train.identity import flatten
from train.prove.divided_step import ACCUMULATION, mesh_of
from train.resolve.execution import ExecutionChoice
from train.resolve.mesh import Device
from train.resolve.mesh_sizes import least_sizes, mesh_mistakes
from train.resolve.sharding import axis_rules

MAX_DEVICES = 8
# The axes that are left out first if the mesh has more devices.
_DISPENSABLE = ("data", "fsdp", "tensor", "expert", "context", "pipeline")
# Devices along these axes send to the next one. Of two devices, each is the next.
_DIRECTED = ("context", "pipeline")
# The size of each key that depends on no other. If it breaks a rule, a multiple is
# tried.
_SIZES = {
    "model.embed_dim": 32,
    "model.mlp_dim": 48,
    "model.expert_dim": 24,
    "model.shared_experts": 1,
}

Changes = dict[str, Any]  # Values by their full key.


def small_sizes(model: ModelConfig) -> dict[str, int]:
    """Return the sizes that are tried first, by key, with those of its parts."""
    own = {
        f"model.{key}": size
        for kind in sized_kinds(model)
        for key, size in kind.small_sizes.items()
    }
    return _SIZES | own


@dataclass(frozen=True)
class Shrunk:
    """A run's config, and a smaller one with the same switches."""

    full: Config
    config: Config

    def with_values(self, changes: Changes) -> "Shrunk":
        """Return the pair with other values of the small config's keys."""
        return Shrunk(self.full, self.config.with_values(changes))

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The old and the new value of each key that differs."""
        old = flatten(self.full)
        new = flatten(self.config)
        keys = [key for key in new if old.get(key) != new[key]]
        return {key: (old.get(key), new[key]) for key in keys}

    def rows(self) -> Changes:
        """Return rows of 64 positions, two of a microbatch on each device."""
        data = self.full.data
        model = self.full.model
        train = self.full.train
        mesh = self.config.mesh
        length = min(64, data.sequence_length)
        microbatches = train.pipeline_microbatches
        shards = batch_shards(axis_rules(mesh), least_sizes(mesh, 1)).rows
        stages = abs(self.full.mesh.pipeline)
        rounds = 2 if microbatches and microbatches > stages else 1
        rows = 2 * shards * self.config.train.accumulation_steps * rounds
        chunk = train.loss_chunk_tokens
        if chunk is None and model.vocab_rows >= 8192:
            # `auto` divides the logits of so many ids.
            chunk = data.sequence_length // 4

        def shorten(positions: int | None) -> int | None:
            return positions and max(3, positions * length // data.sequence_length)

        return {
            "data.sequence_length": length,
            "data.batch_schedule": [],
            "data.sequence_schedule": [],
            "data.batch_size": rows,
            "train.pipeline_microbatches": microbatches and rounds * mesh.pipeline,
            "train.loss_chunk_tokens": shorten(chunk),
            "model.window": shorten(model.window),
            "model.max_sequence_length": model.max_sequence_length and length,
        }

    def candidates(self) -> Iterable[list[Changes]]:
        """Yield alternative changes of depth, heads, sizes, experts and vocabulary."""
        model = self.full.model
        mesh = self.config.mesh
        # Two repeats of the patterns of layers, which are the same on each stage.
        patterns = model.layer_pattern or "1", model.mixer_pattern or "1"
        period = math.lcm(*map(len, patterns), model.experts_every)
        groups = mesh.pipeline * mesh.pipeline_repeats if mesh.pipeline > 1 else 1
        dense = min(model.dense_layers, groups)
        depths = dense + math.lcm(2 * period, groups), dense + 2 * period * groups
        yield [
            {"model.dense_layers": dense, "model.num_layers": depth}
            for depth in depths
            if depth < model.num_layers
        ]
        ratio = min(8, model.num_heads // model.kv_heads)
        yield [
            {
                "model.head_dim": min(model.head_size, head_dim),
                "model.num_heads": kv_heads * ratio,
                "model.num_kv_heads": model.num_kv_heads and kv_heads,
            }
            for head_dim in (8, 32, 128)
            for kv_heads in (min(2, model.kv_heads), 4, 8)
            if kv_heads <= model.kv_heads
        ]
        for key, size in small_sizes(model).items():
            full_size = attrgetter(key)(self.full) or 0
            sizes = (size * factor for factor in (1, 2, 3, 4, 8))
            yield [{key: size} for size in sizes if size < full_size]
        if model.expert_layers:
            used = min(2, model.experts_per_token)
            ratio = min(8, model.num_experts // model.experts_per_token)
            yield [
                {"model.num_experts": experts, "model.experts_per_token": num_used}
                for num_used in (used, model.experts_per_token)
                for experts in (used * ratio, 4, 8, 16, 32, 64)
                if experts <= model.num_experts
            ]
        # Devices exchange rows of a table that has more ids than they have tokens.
        full_mesh = self.full.mesh
        data = self.full.data
        shards = batch_shards(axis_rules(full_mesh), least_sizes(full_mesh, 1))
        tokens = data.batch_size * data.sequence_length
        parts = self.full.train.accumulation_steps * shards.rows * shards.sequence
        has_more_ids = tokens // parts < model.vocab_rows
        sizes = (160, 24) if has_more_ids else (24, 160)
        yield [{"model.vocab_size": size} for size in sizes]

    def base_sizes(self) -> Changes:
        """Return the base of `optimizer.transfer`, whose ratios to the model stay."""
        full = self.full.model
        model = self.config.model
        width = self.full.optimizer.base_width
        depth = self.full.optimizer.base_depth
        width = width and max(1, width * model.embed_dim // full.embed_dim)
        depth = depth and max(1, depth * model.num_layers // full.num_layers)
        return {"optimizer.base_width": width, "optimizer.base_depth": depth}

    def small_mistakes(self, device: Device) -> list[Mistake]:
        """Return the rules that the small config breaks on its virtual devices."""
        config = self.config
        num_devices = math.prod(mesh_of(config.mesh).values())
        mistakes = config_mistakes(config) or mesh_mistakes(config, num_devices)
        if not mistakes:
            try:
                sizes = least_sizes(config.mesh, num_devices)
                ExecutionChoice(config, device, sizes).execution()
            except ConfigError as error:
                return error.mistakes
        return mistakes

    @property
    def left_out(self) -> list[str]:
        """Sentences about what a comparison on a CPU does not cover."""
        full = self.full
        model = self.config.model
        sentences = [
            "The CPU computes in float32, with XLA's attention and plain loops of "
            "experts."
        ]
        sentences += [
            f"mesh.{axis} is 1 because there are {MAX_DEVICES} virtual devices; to "
            "include it, set another axis to 1."
            for axis in mesh_of(full.mesh)
            if axis not in mesh_of(self.config.mesh)
        ]
        if full.model.router_aux_weight != model.router_aux_weight:
            sentences.append(
                "model.router_aux_weight is 0 because that loss depends on how a batch "
                "is divided into microbatches."
            )
        if full.data.batch_schedule or full.data.sequence_schedule:
            sentences.append(
                "Batches have one shape, without data.batch_schedule and "
                "data.sequence_schedule."
            )
        if full.init_from is not None:
            sentences.append("The weights are random, and not those of init_from.")
        return sentences


def shrink(config: Config, device: Device) -> Shrunk:
    """Return a small config with the same switches, for virtual devices of a CPU.

    Args:
        config: the run's config, with its vocabulary size set (`settle`).
        device: one of the CPU's devices.

    Raises:
        ConfigError: if the reduced mesh does not divide the run's dims.
    """
    choices = _choices(config.model, config.mesh, train=config.train)
    shrunk = Shrunk(config, config).with_values(_axis_sizes(config.mesh) | choices)
    shrunk = shrunk.with_values(shrunk.rows())
    for candidates in shrunk.candidates():
        smaller = (shrunk.with_values(changes) for changes in candidates)
        valid = (pair for pair in smaller if not pair.small_mistakes(device))
        shrunk = next(valid, shrunk)
    shrunk = shrunk.with_values(shrunk.base_sizes())
    if mistakes := shrunk.small_mistakes(device):
        raise ConfigError(mistakes)
    return shrunk


def _axis_sizes(mesh: MeshConfig) -> Changes:
    """Return the size of each mesh axis, and its factor across slices."""
    full = mesh_of(mesh)  # The size of an axis is -1 if it takes all other devices.
    primes = (2, 3, 5, 7)
    sizes = {a: next((p for p in primes if n % p == 0), 2) for a, n in full.items()}
    if math.prod(sizes.values()) > MAX_DEVICES:
        sizes = dict.fromkeys(full, 2)
    for axis in filter(full.get, _DISPENSABLE):
        if math.prod(sizes.values()) > MAX_DEVICES:
            sizes[axis] = 1
    for axis in filter(full.get, _DIRECTED):
        has_room = 2 * math.prod(sizes.values()) <= MAX_DEVICES
        if has_room and sizes[axis] == 2 and full[axis] % 4 == 0:
            sizes[axis] = 4
    factors = {a: math.gcd(getattr(mesh.dcn, a), n) for a, n in sizes.items()}
    changes: Changes = {f"mesh.{axis}": size for axis, size in sizes.items()}
    return changes | {"mesh.dcn": DcnConfig(**factors)}


def _choices(model: ModelConfig, mesh: MeshConfig, *, train: TrainConfig) -> Changes:
    """Return the choices that a comparison in float32 needs."""
    changes: Changes = {
        "model.compute_dtype": ComputeDtype.float32,
        "model.param_dtype": Dtype.float32,
        "model.high_precision_layers": (),
        "schedule.warmup_steps": 0,  # A first update of zero would prove nothing.
        "schedule.warmup_tokens": None,
        "mesh.pipeline_repeats": min(mesh.pipeline_repeats, 2),
        ACCUMULATION: min(train.accumulation_steps, 2),
    }
    if model.attention is not Attention.auto:
        changes["model.attention"] = Attention.xla
    if mesh.pipeline != 1 or train.accumulation_steps > 1:
        # This loss depends on the other rows of a microbatch.
        changes["model.router_aux_weight"] = 0.0
    return changes
