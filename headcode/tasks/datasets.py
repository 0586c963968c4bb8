"""Tasks as `torch.utils.data` datasets, for people with their own training loop.

Both are safe with any number of workers: an instance is a pure function of its number, so no worker needs a seed.

    DataLoader(TaskDataset(task, "iid", size=10_000), batch_size=100)                # map-style, may be shuffled
    DataLoader(TaskStream(task, "train", batch_size=128), batch_size=None, num_workers=4)
                                                                   # endless, ready-made batches 0, 1, 2, … in order
"""

import itertools
from collections.abc import Iterator, Sequence

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headcode.tasks.base import Batch, Task


class TaskDataset(Dataset):
    """Instances start … start+size-1 of a split, map-style; items are `Batch` tuples without the batch axis.

    A whole batch of indices is made at once (`__getitems__`), so a DataLoader is as fast as
    `task.sample`.
    """

    def __init__(self, task: Task, split: str, size: int, start: int = 0) -> None:
        if size < 1 or start < 0:
            raise ValueError(f"A dataset has a size of 1 or more and starts at 0 or later, got {size} and {start}.")
        task._checked_split(split)
        self.task, self.split, self.size, self.start = task, split, size, start

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        numbers = [index + self.size if index < 0 else index for index in indices]
        if any(not 0 <= number < self.size for number in numbers):
            raise IndexError(f"This dataset has the items 0..{self.size - 1}, asked for {list(indices)}.")
        x, y, info = self.task.instances(self.split, [self.start + number for number in numbers])
        return [Batch(x[n], y[n], {key: value[n] for key, value in info.items()}) for n in range(len(numbers))]


class TaskStream(IterableDataset):
    """Batches start, start+1, … of a split, ready-made: use it with `DataLoader(stream, batch_size=None)`.

    Worker w of W makes every W-th batch, which a DataLoader interleaves back into the one order that a single process
    gives. With `rank` and `world_size` each process of a distributed run gets its own batches of that order.
    """

    def __init__(
        self,
        task: Task,
        split: str,
        batch_size: int,
        start: int = 0,
        num_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or start < 0 or (num_batches is not None and num_batches < 0):
            raise ValueError("A stream needs batch_size 1 or more, and start and num_batches 0 or more.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..world_size-1, got rank={rank} and world_size={world_size}.")
        task._checked_split(split)
        self.task, self.split, self.batch_size = task, split, batch_size
        self.start, self.num_batches, self.rank, self.world_size = start, num_batches, rank, world_size

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for turn in itertools.count(first, step):
            if self.num_batches is not None and turn >= self.num_batches:
                return
            yield self.task.sample(self.split, self.start + turn * self.world_size + self.rank, self.batch_size)
