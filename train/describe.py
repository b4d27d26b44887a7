"""Say what will happen before it does: devices, layout, cost of a step."""

import jax

from data.batches import Order
from model.params import ParamInfo, named
from train.console import print_table
from train.hardware.chips import peak_flops
from train.mesh_sizes import num_shards
from train.program import Program
from train.sharding import bytes_per_device
from train.units import format_bytes, format_flops


def describe(program: Program) -> None:
    """Print devices, mesh, the size of the state, tokens and FLOPs per step."""
    config, execution = program.config, program.execution
    numerics, rules = execution.numerics, execution.placement.rules
    compute = numerics.compute_dtype
    devices = program.mesh.devices
    sizes = " x ".join(f"{k} {v}" for k, v in program.mesh.shape.items() if v > 1)
    first = devices.flat[0]
    peak = peak_flops(first.device_kind)
    known = "peak not known: no MFU"
    if peak:
        known = f"peak {format_flops(peak, 'FLOP/s')} each"
    print(
        f"devices     {devices.size} x {first.device_kind} ({first.platform}), {known}"
    )
    print(f"mesh        {sizes or 'one device'}")
    if (pipeline := program.pipeline).stages > 1:
        depth = config.model.num_layers // (pipeline.stages * pipeline.repeats)
        print(
            f"pipeline    {pipeline.stages} stages of {pipeline.repeats} x {depth} "
            f"layers, {pipeline.microbatches} microbatches: {pipeline.iterations} "
            f"iterations, {pipeline.bubble:.0%} bubble"
        )
    state = sum(bytes_per_device(leaf) for leaf in jax.tree.leaves(program.state))
    active = ""
    if program.num_active_params < program.num_params:
        active = f", {program.num_active_params:,} of them active in a token"
    params = jax.tree.leaves(program.state.params)
    sharded = sum(not leaf.sharding.is_fully_replicated for leaf in params)
    where = f" in {len(params)} arrays, {sharded} of them sharded"
    print(f"parameters  {program.num_params:,}{active}{where}")
    print(f"state       {format_bytes(state)} a device, with optimizer")
    across = ""
    if (sharing := program.batch_shards.sequence) > 1:
        across = (
            f", {execution.context_attention} over {sharing} devices that share rows"
        )
    print(f"attention   {execution.attention}{across}, products in {compute}")
    groups = num_shards(program.mesh.shape, dict(rules.params)["experts"])
    if program.config.model.expert_layers and groups > 1:
        print(
            f"experts     of a layer on {groups} devices: {execution.expert_exchange}"
        )
    if numerics.quantization is not None:
        dtype, emulated = numerics.quantization
        machine = "rounded to it but multiplied in float32, slowly: a CPU has no other"
        print(f"{dtype:<11} linear layers{', ' + machine if emulated else ''}")
        if kept := [str(n) for n, own in enumerate(config.model.precise) if own]:
            print(f"            those of layer {', '.join(kept)} in {compute}")
    rows, length = config.data.batch_size, config.data.sequence_length
    print(f"step        {rows} rows x {length} = {program.tokens_per_step:,} tokens")
    flops = format_flops(program.flops_per_step)
    print(f"            {flops} of the model (6 N + 12 L C T per token)")
    print(f"steps       {config.train.num_steps:,}", flush=True)


def describe_data(order: Order, num_steps: int) -> None:
    """Print what each source gives in the whole run."""
    used = order.epochs(num_steps)
    for number, (name, rows) in enumerate(order.rows.items()):
        title = "" if number else "data"
        times = f"{used[name]:.2f}" if used[name] >= 0.005 else "less than 0.01"
        use = f"used {times} times" if used[name] else "never used"
        print(f"{title:<11} {name}: {len(rows):,} rows, {use}")


def print_parameters(program: Program) -> None:
    """Print a table of the parameters: shape, dtype, spec and bytes on a device."""
    infos = dict(named(program.infos, lambda x: isinstance(x, ParamInfo)))
    rows = [
        [
            name,
            "x".join(map(str, leaf.shape)),
            str(leaf.dtype),
            " ".join(infos[name].axes),
            str(tuple(leaf.sharding.spec)),
            format_bytes(bytes_per_device(leaf)),
        ]
        for name, leaf in named(program.state.params)
    ]
    headers = ["parameter", "shape", "dtype", "logical axes", "spec", "bytes/device"]
    print_table(rows, headers, "parameters")
