"""The rules that relate several settings of a GPT's config."""

from collections.abc import Iterator, Mapping
from operator import attrgetter

from data.errors import Mistake
from model.choices import Dtype, Mlp, Position, Scaling, TokenShift
from model.config import LATENT_ATTENTION, ModelConfig
from model.mixer_kind import MixerKind

# Whether a rule holds, then the field that it is about, the other fields that it reads,
# and the text of the rule and the remedy.
_Rule = tuple[bool, str, tuple[str, ...], str]


def model_mistakes(
    model: ModelConfig, mixers: Mapping[str, MixerKind]
) -> list[Mistake]:
    """Return a mistake for each rule that a config breaks, those of mixers included."""
    rules = (
        *_shape_rules(model),
        *_choice_rules(model),
        *_dtype_rules(model),
        *_expert_rules(model),
    )
    mistakes = [
        Mistake(
            key=f"model.{field}",
            value=attrgetter(field)(model),
            rule=text,
            related=tuple(f"model.{name}" for name in reads),
        )
        for holds, field, reads, text in rules
        if not holds
    ]
    return [*mistakes, *(m for kind in mixers.values() for m in kind.rules(model))]


def _shape_rules(model: ModelConfig) -> Iterator[_Rule]:
    yield (
        model.head_dim is not None
        or model.has_latent_attention
        or model.embed_dim % model.num_heads == 0,
        "embed_dim",
        ("num_heads", "head_dim", "mixer", "mixer_pattern"),
        f"must be divisible by model.num_heads={model.num_heads}; "
        "change one of them or set model.head_dim",
    )
    yield (
        model.num_heads % model.kv_heads == 0,
        "num_kv_heads",
        ("num_heads",),
        f"must divide model.num_heads={model.num_heads}; "
        "each key/value head serves the same number of query heads",
    )
    yield (
        model.token_shift is TokenShift.none or model.embed_dim % 4 == 0,
        "embed_dim",
        ("token_shift",),
        f"must be divisible by 4 with model.token_shift={model.token_shift}, which "
        "shifts a quarter of the channels",
    )
    yield (
        model.position is not Position.rotary or model.rotary_dim >= 2,
        "rotary_fraction",
        ("position", "head_dim", "embed_dim", "num_heads"),
        f"leaves {model.rotary_dim} of {model.head_size} head dims to rotate; "
        "raise it, or choose model.position=learned",
    )


def _choice_rules(model: ModelConfig) -> Iterator[_Rule]:
    attentions = {"attention", LATENT_ATTENTION}
    yield (
        model.mixer_pattern != () and not attentions <= {*(model.mixer_pattern or ())},
        "mixer_pattern",
        (),
        "must name a mixer, and cannot name both attention and latent_attention, whose "
        "heads have different dims; null gives all layers model.mixer",
    )
    yield (
        model.rope_theta_local is None or model.window is not None,
        "rope_theta_local",
        ("window",),
        "is for local layers, but there are none; set model.window",
    )
    scaling = model.rope_scaling
    # These kinds slow a pair of dims by a factor that depends on its frequency: on how
    # often the pair turns in a row of `original_length`.
    scales_by_frequency = scaling.kind in (Scaling.llama3, Scaling.yarn)
    yield (
        not scales_by_frequency or scaling.original_length is not None,
        "rope_scaling.original_length",
        ("rope_scaling.kind",),
        f"must be set with model.rope_scaling.kind={scaling.kind}: how long rows "
        "were when the model was trained without it",
    )
    fast_turns = scaling.fast_turns_or_default
    is_between = scaling.slow_turns < fast_turns
    if scaling.kind is Scaling.yarn:  # Kimi K2 has equal bounds.
        is_between = scaling.slow_turns <= fast_turns
    yield (
        not scales_by_frequency or is_between,
        "rope_scaling.slow_turns",
        ("rope_scaling.kind", "rope_scaling.fast_turns"),
        f"must be below model.rope_scaling.fast_turns={fast_turns:g}",
    )
    yield (
        model.layer_pattern is None or model.window is not None,
        "window",
        ("layer_pattern",),
        "must be set with model.layer_pattern: it says how many keys a query of a "
        "local layer sees",
    )
    yield (
        model.layer_pattern is None or {*model.layer_pattern} == {"local", "global"},
        "layer_pattern",
        ("window",),
        "must have local and global layers. null makes all layers local with "
        "model.window, and global without it",
    )


def _dtype_rules(model: ModelConfig) -> Iterator[_Rule]:
    yield (
        model.param_dtype is not Dtype.auto,
        "param_dtype",
        (),
        "must be float32 or bfloat16",
    )
    precise_layers = model.high_precision_layers
    dtype = model.compute_dtype
    yield (
        not precise_layers or dtype in ("float8", "int8"),
        "high_precision_layers",
        ("compute_dtype",),
        f"must be [] with model.compute_dtype={dtype}: it only leaves layers out of "
        "float8 or int8",
    )
    layer_numbers = [layer for layer in precise_layers if isinstance(layer, int)]
    yield (
        {*layer_numbers} <= {*range(model.num_layers)}
        and not all(model.high_precision_flags),
        "high_precision_layers",
        ("num_layers",),
        f"must be first, last, or numbers below model.num_layers={model.num_layers},"
        " and leave other layers; otherwise use model.compute_dtype=auto",
    )


def _expert_rules(model: ModelConfig) -> Iterator[_Rule]:
    if model.mlp is not Mlp.moe:
        return
    yield (
        model.experts_per_token <= model.num_experts,
        "experts_per_token",
        ("num_experts",),
        f"must be at most model.num_experts={model.num_experts}",
    )
    yield (
        model.dense_layers < model.num_layers,
        "dense_layers",
        ("num_layers",),
        f"must be below model.num_layers={model.num_layers}, or no layer has "
        "experts; lower it, or choose model.mlp=dense",
    )
    yield (
        (model.num_layers - model.dense_layers) % model.experts_every == 0,
        "experts_every",
        ("num_layers", "dense_layers"),
        f"must divide the {model.num_layers - model.dense_layers} layers after "
        "model.dense_layers: the last layer of each group has experts",
    )
    groups = model.router_groups
    num_kept = model.router_groups_kept
    group_size = model.num_experts // groups
    yield (
        groups == 1
        or (model.num_experts % groups == 0 and group_size >= model.router_group_best),
        "router_groups",
        ("num_experts", "router_group_best"),
        f"must divide model.num_experts={model.num_experts} into groups of at least "
        f"model.router_group_best={model.router_group_best} experts",
    )
    yield (
        num_kept <= groups
        and (groups == 1 or model.experts_per_token <= num_kept * group_size),
        "router_groups_kept",
        ("router_groups", "num_experts", "experts_per_token"),
        f"must be at most model.router_groups={groups}, and so large that the kept "
        f"groups hold model.experts_per_token={model.experts_per_token} experts",
    )
