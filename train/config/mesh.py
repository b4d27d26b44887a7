"""The mesh and its two tables of sharding rules."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from typing_extensions import Doc

from data.config import Count
from model.choices import ContextAttention, ExpertExchange
from train.config.bounds import AxisSize


@dataclass(frozen=True)
class DcnConfig:
    """How many slices or hosts, on the slower network, each mesh axis spans."""

    pipeline: Annotated[
        Count, Doc("The number of slices or hosts that hold different layers.")
    ] = 1
    data: Annotated[
        Count, Doc("The number of slices or hosts that hold replicas of the model.")
    ] = 1
    fsdp: Annotated[
        Count, Doc("The number of slices or hosts that shard the parameters.")
    ] = 1
    context: Annotated[
        Count,
        Doc("The number of slices or hosts that share a row. 1 keeps it in a slice."),
    ] = 1
    expert: Annotated[
        Count,
        Doc(
            "The number of slices or hosts that share experts. 1 keeps them in a slice."
        ),
    ] = 1
    tensor: Annotated[
        Count, Doc("The number of slices or hosts that share each layer.")
    ] = 1


# The mesh axes, in order from the slowest network to the fastest.
MESH_AXES = tuple(axis.name for axis in fields(DcnConfig))


@dataclass(frozen=True)
class MeshConfig:
    """The sizes of the mesh axes, and the two tables of sharding rules.

    One axis may be -1: it takes all devices that the other axes leave. Each table
    maps a logical axis to a mesh axis, a list of mesh axes, or null (replicated).
    """

    pipeline: Annotated[
        AxisSize, Doc("The number of pipeline stages, each with some of the layers.")
    ] = 1
    data: Annotated[AxisSize, Doc("The number of replicas of the model.")] = 1
    fsdp: Annotated[AxisSize, Doc("The number of shards of the parameters.")] = 1
    context: Annotated[AxisSize, Doc("The number of parts of each row.")] = 1
    expert: Annotated[AxisSize, Doc("The number of groups of experts.")] = 1
    tensor: Annotated[AxisSize, Doc("The number of parts of each layer.")] = 1
    context_attention: Annotated[
        ContextAttention,
        Doc(
            "How devices that share a row attend to each other's keys. auto: "
            "all_gather on TPUs if that takes at most 2 GiB of a device, otherwise "
            "ring where it is possible."
        ),
    ] = ContextAttention.auto
    expert_exchange: Annotated[
        ExpertExchange,
        Doc(
            "How tokens reach experts on other devices. auto: if expert has as many "
            "devices as a token has experts, ragged on TPUs and all_to_all on GPUs; "
            "otherwise all_gather."
        ),
    ] = ExpertExchange.auto
    pipeline_repeats: Annotated[
        Count,
        Doc(
            "The number of groups of layers on each stage. More groups shorten the "
            "pipeline bubble, but move weights between stages."
        ),
    ] = 1
    planned: Annotated[
        bool,
        Doc("Take the axis sizes, remat and microbatches from a layout search."),
    ] = False
    dcn: DcnConfig = field(default_factory=DcnConfig)
    params: Annotated[
        dict[str, Any], Doc("How the logical axes of parameters are sharded.")
    ] = field(default_factory=dict)
    activations: Annotated[
        dict[str, Any], Doc("How the logical axes of activations are sharded.")
    ] = field(default_factory=dict)
