"""Variants of a SRAVEN puzzle: the same puzzle under other names, for asking whether a solver depends on the names.

Variant 0 is the puzzle itself. In every other variant the features of each column stand in another order (without
`permute` in one order for all columns), and in prompts the values have letters for names, told with their order. The
answer is the same panel, in the last column's new order. What a variant looks like depends on the task's seed, the
instance and the variant alone.
"""

import string

import numpy as np
import torch

from headcode.tasks.base import Batch
from headcode.tasks.sraven import SRaven
from headcode.tasks.streams import Stream

MOST_VARIANTS = 100
_LETTERS = np.array(list(string.ascii_lowercase))


def variant_orders(task: SRaven, instances: np.ndarray, variant: int) -> np.ndarray:
    """(N, column, position): which position of the puzzle stands at each position of its variant."""
    shape = (len(instances), task.grid, task.num_features)
    if variant == 0:
        return np.broadcast_to(np.arange(task.num_features), shape)
    words = _words(task, instances, variant)[:, : task.grid * task.num_features].reshape(shape)
    orders = np.argsort(words, axis=2, kind="stable")
    return orders if task.permute else np.broadcast_to(orders[:, :1], shape)


def variant_puzzles(task: SRaven, puzzles: np.ndarray, instances: np.ndarray, variant: int) -> np.ndarray:
    """The puzzles (N, row, column, position) of a variant."""
    orders = variant_orders(task, instances, variant)
    return np.take_along_axis(puzzles, np.broadcast_to(orders[:, None], puzzles.shape), axis=3)


def as_variant(task: SRaven, batch: Batch, variant: int) -> Batch:
    """The batch with the variant's puzzles and permutations in its `info`; variant 0 is the batch itself."""
    if variant == 0:
        return batch
    instances = batch.info["instance"].numpy()
    puzzles = variant_puzzles(task, batch.info["puzzles"].numpy(), instances, variant)
    orders = variant_orders(task, instances, variant)
    permutations = np.take_along_axis(batch.info["permutations"].numpy(), orders, axis=2)
    shown = {"puzzles": torch.from_numpy(puzzles), "permutations": torch.from_numpy(permutations)}
    return batch._replace(info={**batch.info, **shown})


def variant_names(task: SRaven, instance: int, variant: int) -> list[str] | None:
    """What a prompt calls the values 0, 1, …: letters in an order of their own, or None for the numbers themselves."""
    if variant == 0 or task.num_values > len(_LETTERS):
        return None
    words = _words(task, np.array([instance]), variant)[0, task.grid * task.num_features :]
    return _LETTERS[np.argsort(words, kind="stable")[: task.num_values]].tolist()


def _words(task: SRaven, instances: np.ndarray, variant: int) -> np.ndarray:
    """Random words of one variant: those of the positions in all columns, then those of the letters."""
    count = task.grid * task.num_features + len(_LETTERS)
    stream = Stream(task.seed, task.task_id, task.version, "variants")
    return stream.words(instances, variant * count)[:, (variant - 1) * count :]
