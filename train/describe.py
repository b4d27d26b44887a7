"""Print what a program and its data consist of, before training begins."""

import jax

from data.batches import Order
from data.phases import phases_of
from model.mixer_catalog import kinds_of
from model.params import ParamInfo, named
from train.config import Transfer
from train.console import print_table
from train.core.layout import bytes_per_device
from train.core.loss.form import choose_form
from train.core.program import Program
from train.core.shards import num_shards
from train.hardware.chips import peak_flops
from train.optimizers.catalog import OPTIMIZERS
from train.resolve.program import ConfiguredProgram
from train.runtime import DOUBLE_BUFFERING
from train.units import format_bytes, format_flops

_NO_PEAK = "unknown peak, so MFU is not shown"


def describe_program(program: ConfiguredProgram) -> None:
    """Print the devices, mesh and state, and the tokens and FLOPs of a step."""
    config = program.config
    devices = program.mesh.devices
    sizes = " x ".join(f"{k} {v}" for k, v in program.mesh.shape.items() if v > 1)
    device = devices.flat[0]
    peak = peak_flops(device.device_kind)
    speed = f"peak {format_flops(peak, 'FLOP/s')} each" if peak else _NO_PEAK
    kind = f"{device.device_kind} ({device.platform})"
    print(f"devices     {devices.size} x {kind}, {speed}")
    print(f"mesh        {sizes or 'one device'}")
    if DOUBLE_BUFFERING in program.compiler_options:
        print("overlap     double buffering of layers (off: runtime.gpu_tuning=false)")
    if (pipeline := program.pipeline).stages > 1:
        depth = config.model.num_layers // (pipeline.stages * pipeline.repeats)
        print(
            f"pipeline    {pipeline.stages} stages of {pipeline.repeats} x {depth} "
            f"layers, {pipeline.microbatches} microbatches: {pipeline.iterations} "
            f"iterations, {pipeline.bubble:.0%} bubble"
        )
    state_bytes = sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(program.state))
    active_note = ""
    if program.num_active_params < program.num_params:
        active_note = f", {program.num_active_params:,} of them active in a token"
    params = jax.tree.leaves(program.state.params)
    num_sharded = sum(not leaf.sharding.is_fully_replicated for leaf in params)
    arrays = f" in {len(params)} arrays, {num_sharded} of them sharded"
    print(f"parameters  {program.num_params:,}{active_note}{arrays}")
    print(f"state       {format_bytes(state_bytes)} a device, with optimizer")
    _describe_layers(program)
    _describe_loss(program)
    phases = phases_of(config.data)
    for n, phase in enumerate(phases):
        title = "" if n else "step"
        text = f"{phase.rows} rows x {phase.length} = {phase.tokens_per_batch:,} tokens"
        since = f" from batch {phase.first_batch:,} on" if len(phases) > 1 else ""
        print(f"{title:<11} {text}{since}")
    flops = format_flops(program.flops_per_step)
    if len(phases) > 1:
        flops += f" for {program.tokens_per_step:,} tokens"
    formulas = ["12 L C T"]
    kinds = kinds_of(config.model)
    formulas += [kinds[mixer].flops_formula for mixer in config.model.mixers]
    formula = f"6 N + {' or '.join(dict.fromkeys(formulas))}"
    print(f"            {flops} of the model ({formula} per token)")
    _describe_groups(program)
    print(f"steps       {config.train.num_steps:,}", flush=True)


def _describe_groups(program: ConfiguredProgram) -> None:
    """Print which parameters have another learning rate or another decay."""
    optimizer = program.config.optimizer
    if optimizer.transfer is not Transfer.none:
        width, depth = OPTIMIZERS.transfer_ratios(optimizer, program.config.model)
        text = f"{width:g} x the width and {depth:g} x the depth of the base"
        print(f"transfer    {optimizer.transfer}: {text}")
    members = OPTIMIZERS.group_members(optimizer, program.infos)
    for group, names in zip(optimizer.groups, members, strict=True):
        decay = group.weight_decay
        text = f"rate times {group.learning_rate:g}"
        text += "" if decay is None else f", decay {decay:g}"
        print(f"group       {group.match}: {text}, for {', '.join(names)}")


def _describe_layers(program: ConfiguredProgram) -> None:
    """Print how attention, experts and 8-bit products are executed."""
    model = program.config.model
    execution = program.execution
    numerics = execution.numerics
    rules = execution.placement.rules
    dtype = numerics.compute_dtype
    kernel = str(execution.attention.kernel)
    if (devices_per_row := program.batch_shards.sequence) > 1:
        method = execution.attention.context
        kernel += f", {method} over {devices_per_row} devices that share rows"
    print(f"attention   {kernel}, products in {dtype}")
    if model.layer_unroll is None and execution.layer_unroll == -1:
        print("layers      unrolled (model.layer_unroll=1 runs a loop)")
    num_devices = num_shards(program.mesh.shape, dict(rules.params)["experts"])
    if model.expert_layers and num_devices > 1:
        exchange = execution.expert_exchange
        print(f"experts     of a layer on {num_devices} devices: {exchange}")
    if numerics.quantization is not None:
        quantized_dtype = numerics.quantization.dtype
        emulated = numerics.quantization.emulated
        note = ", rounded to it but multiplied in float32, slowly: a CPU has no other"
        print(f"{quantized_dtype:<11} linear layers{note if emulated else ''}")
        layers = [str(n) for n, flag in enumerate(model.high_precision_flags) if flag]
        if layers:
            print(f"            those of layer {', '.join(layers)} in {dtype}")


def _describe_loss(program: ConfiguredProgram) -> None:
    """Print which logits exist at once on a device, unless all of them do."""
    config = program.config
    rows = program.execution.placement.microbatch_shape
    assert rows is not None
    form = choose_form(
        config.model, program.execution, rows=rows, chunk=config.train.loss_chunk_tokens
    )
    if form.ids is not None or form.positions < rows[1]:
        print(f"loss        logits of {form}")


def describe_data(order: Order, num_steps: int) -> None:
    """Print how many times the whole run uses each source."""
    epochs = order.epochs(num_steps)
    for i, (name, rows) in enumerate(order.rows.items()):
        title = "" if i else "data"
        count = f"{epochs[name]:.2f}" if epochs[name] >= 0.005 else "less than 0.01"
        use = f"used {count} times" if epochs[name] else "never used"
        print(f"{title:<11} {name}: {len(rows):,} rows, {use}")


def print_parameters(program: Program) -> None:
    """Print a table of the parameters with shape, dtype, spec and bytes per device."""
    infos = dict(named(program.infos, lambda x: isinstance(x, ParamInfo)))
    rows = [
        [
            name,
            "x".join(map(str, leaf.shape)),
            str(leaf.dtype),
            " ".join(axis or "-" for axis in infos[name].axes),
            str(tuple(leaf.sharding.spec)),
            format_bytes(bytes_per_device(leaf)),
        ]
        for name, leaf in named(program.state.params)
    ]
    headers = ["parameter", "shape", "dtype", "logical axes", "spec", "bytes/device"]
    print_table(rows, headers, "parameters")
