"""Pairs of puzzles for patching: recipients, and donors whose codes tell another rule.

Recipients and donors are puzzles that the model solves and whose last rows tell the answers apart. `distribute`, which
one row does not determine, is left out.
"""

import numpy as np
import torch
from torch import Tensor

from headcode.tasks.base import Batch, Outputs
from headcode.tasks.sraven import SRaven
from headcode.tasks.sraven_rules import DISTRIBUTE, apply_rule


def sampled(task: SRaven, split: str, size: int, kind: str, seed: int, outputs: Outputs) -> dict[str, Tensor]:
    """Recipients, donors, the token to patch, and the answers that each outcome would give."""
    batch = task.instances(split, np.arange(size))
    solved = task.judge(outputs(batch.x), batch)["correct"]
    rules = _hidden_rules(task, batch)
    permutations = batch.info["permutations"].numpy().reshape(size, -1)
    rng = np.random.default_rng(seed)
    _, group = np.unique(permutations, axis=0, return_inverse=True)
    found = []
    for recipient in np.flatnonzero(solved):
        token = int(rng.integers(task.num_features))
        mine = rules[recipient, token]
        fits = (group == group[recipient]) & solved & (rules[:, token] != DISTRIBUTE)
        fits &= (rules[:, token] == mine) if kind == "same_rule" else (rules[:, token] != mine)
        fits[recipient] = False
        if mine == DISTRIBUTE or not fits.any():
            continue
        donor = int(rng.choice(np.flatnonzero(fits)))
        own, copy = int(batch.y[recipient, token]), int(batch.y[donor, token])
        theirs = apply_rule(
            feature_cells(task, batch, int(recipient), token)[-1], int(rules[donor, token]), task.num_values
        )
        if copy not in (own, theirs) and (kind == "same_rule" or theirs != own):
            found.append((recipient, donor, token, own, theirs, copy))
    chosen = torch.tensor(found, dtype=torch.long).reshape(-1, 6)
    return {
        "recipient": batch.x[chosen[:, 0]],
        "donor": batch.x[chosen[:, 1]],
        **{name: chosen[:, 2 + i] for i, name in enumerate(("token", "own", "donors", "copy"))},
    }


def rewritten(task: SRaven, split: str, size: int, seed: int, outputs: Outputs) -> dict[str, Tensor]:
    """Recipients beside themselves with another rule for one feature: only the last cells of its first rows differ."""
    batch = task.instances(split, np.arange(size))
    rules = _hidden_rules(task, batch)
    solved = task.judge(outputs(batch.x), batch)["correct"]
    rng = np.random.default_rng(seed)
    puzzles, found = [], []
    for recipient in np.flatnonzero(solved):
        token = int(rng.integers(task.num_features))
        mine = int(rules[recipient, token])
        others = [rule for rule in task.rule_ids if rule not in (mine, DISTRIBUTE)]
        if mine == DISTRIBUTE or not others:
            continue
        rule = int(rng.choice(others))
        cells = feature_cells(task, batch, int(recipient), token)
        own = int(batch.y[recipient, token])
        theirs = apply_rule(cells[-1], rule, task.num_values)
        if theirs == own:
            continue
        puzzle = batch.info["puzzles"][recipient].numpy().copy()
        for row in range(task.grid - 1):
            puzzle[row, -1, token] = apply_rule(cells[row], rule, task.num_values)
        puzzles.append(puzzle)
        found.append((recipient, token, own, theirs, theirs))
    if not found:
        return {"token": torch.zeros(0, dtype=torch.long)}
    chosen = torch.tensor(found)
    donors = task.encode(np.stack(puzzles))
    given = outputs(donors).argmax(-1)
    # A donor that the model itself gets wrong has no code to give.
    works = given[torch.arange(len(chosen)), chosen[:, 1]] == chosen[:, 3]
    return {
        "recipient": batch.x[chosen[:, 0]][works],
        "donor": donors[works],
        **{name: chosen[:, 1 + i][works] for i, name in enumerate(("token", "own", "donors", "copy"))},
    }


def _hidden_rules(task: SRaven, batch: Batch) -> np.ndarray:
    """(N, position): the rules of the hidden tokens."""
    return batch.info["token_rules"][:, task.queries].numpy()


def feature_cells(task: SRaven, batch: Batch, puzzle: int, token: int) -> list[list[int]]:
    """The cells that show a hidden token's feature, row by row, without the last column."""
    permutations = batch.info["permutations"][puzzle].numpy()  # (column, position)
    feature = permutations[-1, token]
    places = [int(np.flatnonzero(column == feature)[0]) for column in permutations[:-1]]
    cells = batch.info["puzzles"][puzzle].numpy()  # (row, column, position)
    return [[int(row[c, place]) for c, place in enumerate(places)] for row in cells]
