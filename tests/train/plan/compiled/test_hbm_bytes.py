"""The bytes that instructions move in main memory are counted."""

from train.plan.compiled.hbm_bytes import memory_traffic
from train.plan.compiled.trip_counts import read_module

INDEX = 4  # bytes of an index
ROW = 4 * 64  # bytes of a row of the arrays below
ARRAY = "f32[16,64]"
ONE_ROW = "f32[1,64]"


def fusion_traffic(operands: list[str], body: list[str], computations: str = "") -> int:
    """Return the bytes a fusion moves; its body names its operands %p0, %p1, ..."""
    parameters = "\n".join(
        f"  %p{number} = {operand} parameter({number})"
        for number, operand in enumerate(operands)
    )
    operand_names = ", ".join(f"%p{number}" for number in range(len(operands)))
    lines = "\n".join(f"  {line}" for line in body)
    text = f"""HloModule fused

{computations}
%inside (p: f32[]) -> f32[] {{
{parameters}
  %z = s32[] constant(0)
{lines}
}}

ENTRY %main (p: f32[]) -> f32[] {{
{parameters}
  ROOT %f = f32[16,64] fusion({operand_names}), kind=kLoop, calls=%inside
}}
"""
    module = read_module(text)
    assert module.unread == []
    return memory_traffic(module.entry.root)


def test_slices_and_updates_move_what_they_touch():
    """A row is read and a row is written; the other operand lies in the core."""
    body = [
        f"%old = {ONE_ROW} dynamic-slice(%p0, %p1, %z), dynamic_slice_sizes={{1,64}}",
        f"%new = {ONE_ROW} add(%old, %p2)",
        f"ROOT %u = {ARRAY} dynamic-update-slice(%p0, %new, %p1, %z)",
    ]
    in_core = f"{ONE_ROW}{{1,0:T(1,128)S(1)}}"
    assert fusion_traffic([ARRAY, "s32[]", in_core], body) == INDEX + 2 * ROW


def test_a_nested_fusion_reads_only_what_it_slices():
    """The product reads one row of sixteen, and all of an operand that is reshaped."""
    computations = """%shaped (p: f32[4,64]) -> f32[64,4] {
  %p = f32[4,64] parameter(0)
  ROOT %b = f32[64,4] bitcast(%p)
}

%taken (p: f32[16,64], i: s32[]) -> f32[1,64] {
  %p = f32[16,64] parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,64] dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,64}
}
"""
    body = [
        f"%row = {ONE_ROW} fusion(%p1, %p0), kind=kLoop, calls=%taken",
        "%w = f32[64,4] fusion(%p2), kind=kLoop, calls=%shaped",
        "ROOT %y = f32[1,4] convolution(%row, %w), dim_labels=bf_io->bf",
    ]
    traffic = fusion_traffic(["s32[]", ARRAY, "f32[4,64]"], body, computations)
    assert traffic == INDEX + ROW + 4 * ROW + 4 * 4


def test_passed_operands_and_results_of_collectives_cost_a_fusion_nothing():
    """The fusion reads a row, writes a row, and reads the shard of the collective."""
    body = [
        f"%s = {ONE_ROW} add(%p1, %p1)",
        "%g = f32[4,64] all-gather(%p2), dimensions={0}",
        f"ROOT %t = ({ONE_ROW}, {ARRAY}, f32[4,64]) tuple(%s, %p0, %g)",
    ]
    assert fusion_traffic([ARRAY, ONE_ROW, "f32[2,64]"], body) == (1 + 1 + 2) * ROW


def test_a_call_of_a_sparse_core_counts_its_bytes_once():
    """No other instruction of the call counts the arrays again."""
    text = """HloModule copying

%copied (p: f32[16,64]) -> f32[16,64] {
  %p = f32[16,64] parameter(0)
  ROOT %c = f32[16,64]{0,1} copy(%p)
}

ENTRY %main (a: f32[16,64]) -> f32[16,64] {
  %a = f32[16,64] parameter(0)
  %start = ((), (), (s32[8192])) custom-call-start(), called_computations={%copied}
  %update = ((f32[16,64]), f32[16,64], (s32[8192])) custom-call-update(%start, %a)
  ROOT %done = f32[16,64] custom-call-done(%update)
}
"""
    traffic = sum(memory_traffic(e.instruction) for e in read_module(text).executed)
    assert traffic == 2 * 16 * ROW
