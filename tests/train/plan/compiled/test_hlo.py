"""HLO text is parsed into computations and instructions."""

import pytest

from train.plan.compiled.hlo import HloArray, parse

TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "step.py"

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(%x, %y)
}

%fused (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %neg = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} negate(%p), metadata={op_name="a/neg"}
}

ENTRY %main.3 (a: bf16[8,128], b: (f32[2], s32[])) -> (bf16[8,128], f32[]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="p[\\'w\\']"}
  %f = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%a), kind=kLoop, calls=%fused
  %call = ((f32[2]{0}, pred[3]), /*index=1*/u32[]{:S(2)}) custom-call(%a, %f), """
TEXT += """custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, (}"
}}, metadata={op_name="jit(step)/kernel" stack_frame_id=3}
  %r = f32[] all-reduce(%call), channel_id=1, replica_groups={{0,1}}, to_apply=%add.1
  ROOT %t = (bf16[8,128]{1,0}, f32[]) tuple(%f, %r)
}
"""


def test_instructions_are_read():
    module = parse(TEXT)
    assert module.unread == []
    assert list(module.computations) == ["add.1", "fused", "main.3"]
    entry = module.entry.instructions
    assert list(entry) == ["a", "f", "call", "r", "t"]
    assert module.entry.root is entry["t"]
    assert entry["a"].op_name == r"p[\'w\']"
    assert entry["f"].arrays == (HloArray("bf16", (8, 128), 1),)
    assert entry["f"].called == [module.computations["fused"]]
    assert entry["r"].called == []  # A reducer is no part of the program's work.
    assert entry["t"].operands == [entry["f"], entry["r"]]
    assert [i.name for i in entry["f"].nested] == ["p", "neg"]
    assert [i.name for i in entry["f"].users] == ["call", "t"]


def test_an_instruction_may_span_several_lines():
    call = parse(TEXT).entry.instructions["call"]
    assert call.opcode == "custom-call"
    assert [operand.name for operand in call.operands] == ["a", "f"]
    assert call.op_name == "jit(step)/kernel"
    shapes = [(a.dtype, a.dims, a.space) for a in call.arrays]
    assert shapes == [("f32", (2,), 0), ("pred", (3,), 0), ("u32", (), 2)]


def test_an_unreadable_line_is_listed():
    text = TEXT.replace("  %r = f32[] all-reduce(%call),", "  %r = what is this")
    (line,) = parse(text).unread
    assert line.startswith("%r = what is this")


def test_a_text_that_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="not an HLO module"):
        parse("module @jit_step {\n}\n")
