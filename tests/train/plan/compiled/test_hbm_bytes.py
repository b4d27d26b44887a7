"""Bytes that instructions move."""

import pytest

from tests.train.compiled import in_one
from train.plan.compiled.buffers import largest_buffers
from train.plan.compiled.hbm_bytes import memory_traffic
from train.plan.compiled.hlo import parse
from train.plan.compiled.source_lines import SourceLines
from train.plan.compiled.trip_counts import read_module

FUSED = """HloModule fused

%inside (p: f32[16,64], i: s32[], q: f32[1,64]) -> f32[16,64] {
  %p = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %q = f32[1,64] parameter(2)
  %z = s32[] constant(0)
  %old = f32[1,64] dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,64}
  %new = f32[1,64] add(%old, %q)
  ROOT %u = f32[16,64] dynamic-update-slice(%p, %new, %i, %z)
}

ENTRY %main (a: f32[16,64], i: s32[], b: f32[1,64]) -> f32[16,64] {
  %a = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[1,64]{1,0:T(1,128)S(1)} parameter(2)
  ROOT %f = f32[16,64] fusion(%a, %i, %b), kind=kLoop, calls=%inside
}
"""


def test_slices_and_updates_move_what_they_touch():
    """A row is read and a row is written; the other operand lies in the core."""
    module = read_module(FUSED)
    index, row = 4, 4 * 64
    assert memory_traffic(module.entry.root) == index + 2 * row


NESTED = """HloModule nested

%shaped (p: f32[4,64]) -> f32[64,4] {
  %p = f32[4,64] parameter(0)
  ROOT %b = f32[64,4] bitcast(%p)
}

%taken (p: f32[16,64], i: s32[]) -> f32[1,64] {
  %p = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,64] dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,64}
}

%inside (i: s32[], p: f32[16,64], q: f32[4,64]) -> f32[1,4] {
  %i = s32[] parameter(0)
  %p = f32[16,64] parameter(1)
  %q = f32[4,64] parameter(2)
  %row = f32[1,64] fusion(%p, %i), kind=kLoop, calls=%taken
  %w = f32[64,4] fusion(%q), kind=kLoop, calls=%shaped
  ROOT %y = f32[1,4] convolution(%row, %w), dim_labels=bf_io->bf
}

ENTRY %main (i: s32[], a: f32[16,64], b: f32[4,64]) -> f32[1,4] {
  %i = s32[] parameter(0)
  %a = f32[16,64] parameter(1)
  %b = f32[4,64] parameter(2)
  ROOT %f = f32[1,4] fusion(%i, %a, %b), kind=kOutput, calls=%inside
}
"""


def test_a_fusion_inside_another_reads_what_it_takes():
    """One row of sixteen for a product, and all of what is only shaped for it."""
    module = read_module(NESTED)
    index, row, weight, result = 4, 4 * 64, 4 * 4 * 64, 4 * 4
    moved = memory_traffic(module.entry.root)
    assert moved == index + row + weight + result


TILES = """HloModule tiles

%tiled (p: f32[16,64]) -> f32[16,64] {
  %p = f32[16,64]{1,0:T(16,128)} parameter(0)
  ROOT %c = f32[16,64]{1,0:T(8,128)} copy(%p)
}

%inside (p: f32[16,64], i: s32[], q: f32[1,64]) -> f32[16,64] {
  %p = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %q = f32[1,64] parameter(2)
  %z = s32[] constant(0)
  %t = f32[16,64] fusion(%p), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, \
calls=%tiled
  ROOT %u = f32[16,64] dynamic-update-slice(%t, %q, %i, %z)
}

ENTRY %main (a: f32[16,64], i: s32[], b: f32[1,64]) -> f32[16,64] {
  %a = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %b = f32[1,64] parameter(2)
  %n = f32[16,64] negate(%a)
  %f = f32[16,64] fusion(%n, %i, %b), kind=kLoop, calls=%inside
  ROOT %r = f32[16,64] add(%f, %f)
}
"""


def test_a_change_of_tiles_inside_a_fusion_moves_nothing():
    """A row is read and a row is written, into the buffer of the operand."""
    module = read_module(TILES)
    index, row = 4, 4 * 64
    moved = memory_traffic(module.entry.instructions["f"])
    assert moved == index + 2 * row
    buffers = largest_buffers(module, SourceLines(TILES), 3)
    assert [buffer.bytes for buffer in buffers] == [16 * row]


COPYING = """HloModule copying

%copied (p: f32[16,64]) -> f32[16,64] {{
  %p = f32[16,64] parameter(0)
  ROOT %c = f32[16,64]{{0,1}} {work}
}}

ENTRY %main (a: f32[16,64]) -> f32[16,64] {{
  %a = f32[16,64] parameter(0)
  %start = ((), (), (s32[8192])) custom-call-start(), called_computations={{%copied}}
  %update = ((f32[16,64]), f32[16,64], (s32[8192])) custom-call-update(%start, %a)
  ROOT %done = f32[16,64] custom-call-done(%update)
}}
"""


@pytest.mark.parametrize(
    ("work", "arrays"),
    [
        ("copy(%p)", 2),
        ("all-reduce(%p), replica_groups={}", 1),  # as if a core had started it
    ],
)
def test_a_sparse_core_moves_what_its_work_moves(work, arrays):
    """No instruction of the call counts the arrays again."""
    module = read_module(COPYING.format(work=work))
    moved = sum(memory_traffic(e.instruction) for e in module.executed)
    assert moved == arrays * 16 * 64 * 4


PASSING = """HloModule passing

%inside (p: f32[16,64], q: f32[1,64], r: f32[2,64]) -> (f32[1,64], f32[16,64], f32[4,64]) {
  %p = f32[16,64] parameter(0)
  %q = f32[1,64] parameter(1)
  %r = f32[2,64] parameter(2)
  %s = f32[1,64] add(%q, %q)
  %g = f32[4,64] all-gather(%r), dimensions={0}
  ROOT %t = (f32[1,64], f32[16,64], f32[4,64]) tuple(%s, %p, %g)
}

ENTRY %main (a: f32[16,64], b: f32[1,64], c: f32[2,64]) -> (f32[1,64], f32[16,64], f32[4,64]) {
  %a = f32[16,64] parameter(0)
  %b = f32[1,64] parameter(1)
  %c = f32[2,64] parameter(2)
  ROOT %f = (f32[1,64], f32[16,64], f32[4,64]) fusion(%a, %b, %c), kind=kOutput, calls=%inside
}
"""  # noqa: E501 one line each, as XLA prints it


def test_what_a_fusion_passes_on_or_a_collective_writes_beside_it_costs_nothing():
    """One row in, one row out, and the shard of the collective."""
    module = read_module(PASSING)
    moved = memory_traffic(module.entry.root)
    assert moved == (1 + 1 + 2) * 64 * 4


@pytest.mark.parametrize(
    ("result", "instruction", "moved"),
    [
        ("(f32[16,64]{0:S(1)}, f32[16,64], u32[])", "copy-start(%main)", 16),
        ("(f32[16,64], f32[16,64]{0:S(1)}, u32[])", "copy-start(%core)", 16),
        ("(f32[16,64], f32[4,64]{0:S(1)}, s32[])", "slice-start(%main)", 4),
        ("f32[16,64]", 'custom-call(), custom_call_target="AllocateBuffer"', 0),
    ],
)
def test_copies_between_memories_move_what_they_copy(result, instruction, moved):
    text = in_one(
        "  %main = f32[16,64] parameter(0)\n"
        "  %core = f32[16,64]{0:S(1)} parameter(1)\n"
        f"  ROOT %c = {result} {instruction}"
    )
    module = parse(text)
    assert memory_traffic(module.entry.root) == moved * 64 * 4
