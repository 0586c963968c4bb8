"""Products of tensors depend, in their last bits, on where the tensors start in memory: ours start where torch's do."""

import pytest
import torch
from safetensors.torch import save_file

from headcode.memory import ALIGNMENT, aligned
from headcode.tasks import FuzzyLogic, SRaven
from headcode.train.checkpoint import read_tensors


def shifted(tensor, offset):
    """The same numbers, starting so many numbers after a multiple of the alignment."""
    room = torch.empty(tensor.numel() + ALIGNMENT)
    start = -(room.data_ptr() // 4) % (ALIGNMENT // 4) + offset
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def test_aligned_tensors_are_taken_and_others_copied():
    whole = shifted(torch.randn(6, 5), 0)
    assert aligned(whole) is whole
    for offset in range(1, 16):
        moved = aligned(shifted(whole, offset))
        assert moved.data_ptr() % ALIGNMENT == 0 and torch.equal(moved, whole)


def test_a_product_of_aligned_copies_has_the_same_bits_wherever_its_factors_were():
    x, weight = torch.randn(35, 5), torch.randn(11, 5)
    expected = aligned(x) @ weight.T
    for offset in range(16):
        assert torch.equal(aligned(shifted(x, offset)) @ weight.T, expected)


@pytest.mark.parametrize("task", [FuzzyLogic(num_points=7), SRaven(num_features=2)], ids=lambda task: task.name)
def test_batches_start_where_tensors_of_torch_do(task):
    kept = []  # so that each batch finds room elsewhere
    for index in range(40):
        batch = task.sample("train", index, 3)
        kept.append((batch, bytearray(17 * index)))
        assert batch.x.data_ptr() % ALIGNMENT == 0 and batch.y.data_ptr() % ALIGNMENT == 0
    assert task.instances("train", [5, 3]).x.data_ptr() % ALIGNMENT == 0


def test_weights_that_were_read_start_where_tensors_of_torch_do(tmp_path):
    tensors = {f"t{n}": torch.randn(n) for n in range(1, 30)}
    save_file(tensors, tmp_path / "w.safetensors")
    for name, tensor in read_tensors(tmp_path / "w.safetensors").items():
        assert tensor.data_ptr() % ALIGNMENT == 0 and torch.equal(tensor, tensors[name])
