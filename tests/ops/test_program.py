"""Launches that are planned once get their addresses at each call, and kernels then find what they are to do."""

import struct

import numpy as np
import pytest
import torch

from headcode.ops import cpu
from headcode.ops.cpu import records
from headcode.ops.cpu.launch import UNIT, Area, Program, Section, Value, contiguous, record
from headcode.ops.cpu.library import KernelName

pytestmark = pytest.mark.skipif(bool(cpu.NO_KERNELS), reason=f"no kernels: {cpu.NO_KERNELS}")


def test_sections_follow_each_other_on_lines_of_the_cache():
    area = Area("kept")
    first, second, third = area.take(2, 3, 5), area.take(7), area.take(0)
    assert (first.start, first.strides) == (0, (15, 5, 1))
    assert (second.start, third.start) == (2 * UNIT, 3 * UNIT)
    assert area.size == 4 * UNIT  # a vector may be read past the end
    assert second.memory == "kept"


def test_sections_are_the_views_that_torch_makes():
    memory = torch.arange(300.0)
    area = Area("kept")
    area.take(11)
    joined = area.take(3, 5, 14)  # (B, T, two heads of 2 + 2 + 3)
    tokens = joined.of(memory)
    assert torch.equal(tokens, memory[16 : 16 + 210].view(3, 5, 14))
    assert torch.equal(joined.of(torch.cat([torch.zeros(7), memory])[7:]), tokens)  # memory within other memory
    keys = joined.by_head(2, 4, 4)
    assert torch.equal(keys.of(memory), tokens[:, :, 4:8].unflatten(2, (2, 2)).transpose(1, 2))
    matrix = contiguous("kept", 20, (7, 3))
    parts = [part.of(memory) for part in matrix.split(2, 5)]
    assert [torch.equal(a, b) for a, b in zip(parts, matrix.of(memory).split((2, 5)), strict=True)] == [True, True]


def test_addresses_and_values_are_bound_and_everything_else_stays():
    program = Program()
    section = Section("given", 3, (2,), (1,), torch.float64)
    program.launch("first", KernelName("none", "first"), [0, 0, 5, contiguous("other", 2, (4,))], 7)
    program.launch("second", KernelName("none", "second"), [0, 0, section, 0.5, Value("stream")], 3)
    for stream in (2**31, 5):
        memory = {"given": torch.zeros(6, dtype=torch.float64), "other": torch.zeros(6), "unused": torch.zeros(1)}
        bound = program.bind(memory, stream=stream)
        words = bound._words.tolist()
        assert words[:4] == [0, 7, 5, memory["other"].data_ptr() + 8]
        assert words[4:7] == [0, 3, memory["given"].data_ptr() + 24]
        assert struct.unpack("d", struct.pack("q", words[7])) == (0.5,)
        assert words[8] == stream
        assert bound.view(section).data_ptr() == words[6]
    assert program.launches["second"].offset == 32


def test_a_record_takes_strides_where_it_has_room_for_them_and_no_unknown_field():
    section = contiguous("kept", 0, (2, 3, 5, 7))
    words = record(records.ATTENTION, q=section, saved=section, heads=3)
    assert len(words) == records.ATTENTION.itemsize // 8
    first = records.ATTENTION.fields["q"][1] // 8
    assert words[first : first + 5] == [section, 105, 35, 7, 1]
    assert words[records.ATTENTION.fields["saved"][1] // 8] is section
    assert words[records.ATTENTION.fields["heads"][1] // 8] == 3
    with pytest.raises(KeyError, match="no field head"):
        record(records.ATTENTION, head=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bound_program_sums_in_a_fixed_order_where_it_was_told(dtype):
    parts, total = torch.randn(3, 40, dtype=dtype), torch.full((40,), float("nan"), dtype=dtype)
    program = Program()
    program.launch_sum("sum", contiguous("parts", 0, (3, 40), dtype), contiguous("total", 0, (40,), dtype))
    program.bind({"parts": parts, "total": total}).run("sum")
    np.testing.assert_array_equal(total, (parts[0] + parts[1]) + parts[2])
