"""Launches that are planned once get their addresses at each call, and kernels then find what they are to do."""

import struct

import numpy as np
import pytest
import torch

from headcode.ops import cpu
from headcode.ops.cpu.launch import ITSELF, UNIT, Area, Place, Program, contiguous

pytestmark = pytest.mark.skipif(bool(cpu._NO_KERNELS), reason=f"no kernels: {cpu._NO_KERNELS}")


def test_sections_follow_each_other_on_lines_of_the_cache():
    area = Area(3)
    first, second, third = area.take(2, 3, 5), area.take(7), area.take(0)
    assert (first.start, first.strides) == (0, (15, 5, 1))
    assert (second.start, third.start) == (2 * UNIT, 3 * UNIT)
    assert area.size == 4 * UNIT  # a vector may be read past the end
    assert second.data_ptr() == Place(3, 4 * 2 * UNIT)


def test_sections_are_the_views_that_torch_makes():
    memory = torch.arange(300.0)
    area = Area(1)
    area.take(11)
    joined = area.take(3, 5, 14)  # (B, T, two heads of 2 + 2 + 3)
    tokens = joined.of(memory)
    assert torch.equal(tokens, memory[16 : 16 + 210].view(3, 5, 14))
    assert torch.equal(joined.of(torch.cat([torch.zeros(7), memory])[7:]), tokens)  # memory within other memory
    keys = joined.by_head(2, 4, 4)
    assert torch.equal(keys.of(memory), tokens[:, :, 4:8].unflatten(2, (2, 2)).transpose(1, 2))
    matrix = contiguous(1, 20, (7, 3))
    parts = [part.of(memory) for part in matrix.split((2, 5))]
    assert [torch.equal(a, b) for a, b in zip(parts, matrix.of(memory).split((2, 5)), strict=True)] == [True, True]


def test_addresses_are_bound_and_everything_else_stays():
    program = Program()
    table = program.table([Place(2, 8), 5])
    program.launch("one", 4711, [0, Place(1, 4), 0.5, table], 3)
    assert table == Place(ITSELF, 0)
    for starts in ((1000, 2000), (30, 2**47)):
        bound = program.bind(starts)
        words = bound._words
        assert words.tolist()[:4] == [starts[1] + 8, 5, 0, starts[0] + 4]
        assert struct.unpack("d", struct.pack("q", words[4])) == (0.5,)
        assert words[5] == words.ctypes.data == bound._start
    assert program.launches["one"].place == 16


def test_a_bound_program_runs_its_kernel_where_it_was_told():
    from headcode.ops.cpu.block_plan import _kernels

    parts = torch.randn(3, 40)
    total = torch.full((40,), float("nan"))
    program = Program()
    program.launch("sum", _kernels()["sum"], [0, Place(1, 0), Place(2, 0), 3, 40, 16], 3)
    program.bind((parts.data_ptr(), total.data_ptr())).run("sum")
    np.testing.assert_array_equal(total, (parts[0] + parts[1]) + parts[2])
