"""Tasks behind a DataLoader: any number of workers, any order, the same instances."""

import pytest
import torch
from torch.utils.data import DataLoader

from headcode.tasks import FuzzyLogic, SRaven, TaskDataset, TaskStream


@pytest.mark.parametrize("task", [FuzzyLogic(num_points=5), SRaven(num_features=2)], ids=["logic", "sraven"])
def test_map_style_items_are_the_instances(task):
    dataset = TaskDataset(task, "iid", size=11, start=7)
    assert len(dataset) == 11
    expected = task.instances("iid", range(7, 18))
    for n in (0, 10, -1):
        item = dataset[n]
        assert torch.equal(item.x, expected.x[n])
        assert torch.equal(item.y, expected.y[n])
    loaded = list(DataLoader(dataset, batch_size=4))
    assert [len(batch.x) for batch in loaded] == [4, 4, 3]
    assert torch.equal(torch.cat([batch.x for batch in loaded]), expected.x)
    for name, value in expected.info.items():
        assert torch.equal(torch.cat([batch.info[name] for batch in loaded]), value)
    shuffled = next(iter(DataLoader(dataset, batch_size=11, shuffle=True)))
    assert sorted(shuffled.info["instance"].tolist()) == list(range(7, 18))
    for n, number in enumerate(shuffled.info["instance"].tolist()):
        assert torch.equal(shuffled.x[n], expected.x[number - 7])


def test_a_stream_gives_the_tasks_own_batches_in_order():
    task = SRaven(num_features=2)
    batches = list(TaskStream(task, "train", batch_size=3, start=5, num_batches=4))
    assert len(batches) == 4
    for turn, batch in enumerate(batches):
        assert torch.equal(batch.x, task.sample("train", 5 + turn, 3).x)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_do_not_change_a_stream(num_workers):
    task = FuzzyLogic(num_points=3)
    stream = TaskStream(task, "train", batch_size=5, num_batches=7)
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers, multiprocessing_context="fork")
    found = [batch.info["instance"].tolist() for batch in loader]
    assert found == [list(range(5 * turn, 5 * turn + 5)) for turn in range(7)]


@pytest.mark.slow
def test_spawned_workers_give_the_same_bytes():
    task = SRaven(num_features=2)
    dataset = TaskDataset(task, "train", size=8)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="spawn")
    assert torch.equal(torch.cat([batch.x for batch in loader]), task.sample("train", 0, 8).x)


def test_ranks_share_the_batches_out():
    task = FuzzyLogic(num_points=3)
    streams = [TaskStream(task, "iid", 2, num_batches=3, rank=rank, world_size=2) for rank in range(2)]
    first, second = ([int(batch.info["instance"][0]) for batch in stream] for stream in streams)
    assert first == [0, 4, 8]
    assert second == [2, 6, 10]


def test_mistakes_are_told_at_once():
    task = FuzzyLogic()
    with pytest.raises(ValueError, match="no split"):
        TaskDataset(task, "test", 4)
    with pytest.raises(ValueError, match="size of 1 or more"):
        TaskDataset(task, "iid", 0)
    with pytest.raises(IndexError, match="0..3"):
        TaskDataset(task, "iid", 4)[4]
    with pytest.raises(ValueError, match="no split"):
        TaskStream(task, "test", 4)
    with pytest.raises(ValueError, match="batch_size 1 or more"):
        TaskStream(task, "iid", 0)
    with pytest.raises(ValueError, match="rank must lie"):
        TaskStream(task, "iid", 4, rank=2, world_size=2)
