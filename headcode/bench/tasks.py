"""How fast the tasks are made and solved, how good anyone can be at them, and what shortcuts give.

Example: headcode bench tasks --puzzles 100000
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from headcode.bench.measure import torch_threads
from headcode.tasks import FuzzyLogic, SRaven, add_sums, oracle
from headcode.tasks.base import Task
from headcode.tasks.baselines import LOGIC_BASELINES, SRAVEN_BASELINES, score_sraven

# Small settings for which the same puzzle may well turn up in two splits.
SMALL = (
    SRaven(num_features=2, num_values=3, grid=3),
    SRaven(num_features=2, num_values=4, grid=3),
    SRaven(num_features=2, num_values=8, grid=3),
    SRaven(num_features=3, num_values=8, grid=3),
)

SHORTEST = 0.02
"""Seconds that are timed at once: a process's clock may tick in hundredths."""


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Speed, ceilings, ambiguity, baselines and shared puzzles of the paper's settings (one core)."""

    puzzles: int = 100_000
    """Puzzles per split for the ceiling and the baselines."""
    overlap: int = 200_000
    """Instances per split that are compared with those of the other splits; 0 leaves it out."""
    batch_size: int = 128
    """Batch size of the speed measurements."""
    seed: int = 0
    """Seed of the tasks."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        if self.puzzles < 2 or self.overlap < 0 or self.batch_size < 1:
            raise ValueError("--puzzles must be 2 or more, --overlap 0 or more and --batch-size 1 or more.")
        with torch_threads(1):
            self._run()

    def _run(self) -> None:
        sections: dict[str, Any] = {}
        logic, sraven = FuzzyLogic(seed=self.seed), SRaven(seed=self.seed)
        for name, rows in (
            ("speed", lambda: speeds(logic, sraven, self.batch_size)),
            ("sraven", lambda: [sraven_split(sraven, split, self.puzzles) for split in sraven.splits]),
            ("logic", lambda: [logic_split(logic, split, min(self.puzzles, 20_000)) for split in logic.splits]),
            ("shared", lambda: shared_rows(sraven, logic, self.overlap)),
        ):
            if name == "shared" and not self.overlap:
                continue
            sections[name] = rows()
            if not self.json:
                print(_heading(name, self))
                print(_table(sections[name]) + "\n", flush=True)
        if self.json:
            print(json.dumps({"config": dataclasses.asdict(self), **sections}))


def speeds(logic: FuzzyLogic, sraven: SRaven, batch_size: int) -> list[dict[str, Any]]:
    """Things per second of one core: the best of several runs, so that other work on the machine counts little."""
    numbers = np.arange(batch_size)
    puzzles = sraven.raw("iid", np.arange(2000))["puzzles"]
    points = batch_size * logic.num_points
    return [
        _speed("SRAVEN puzzles, cells only", batch_size, lambda: sraven.raw("train", numbers), 500_000),
        _speed("SRAVEN puzzles, whole batches", batch_size, lambda: sraven.sample("train", 0, batch_size), 500_000),
        _speed("fuzzy-logic points, whole batches", points, lambda: logic.sample("train", 0, batch_size), 500_000),
        _speed("SRAVEN puzzles solved by the oracle", len(puzzles), lambda: oracle.solve(puzzles), 20_000),
    ]


def _speed(name: str, count: int, work: Callable[[], Any], goal: int) -> dict[str, Any]:
    work()  # compiles
    best, spent = float("inf"), 0.0
    while spent < 1.0:
        start, calls, taken = time.process_time(), 0, 0.0  # one core's time, whatever else the machine does
        while taken < SHORTEST:
            work()
            calls, taken = calls + 1, time.process_time() - start
        best, spent = min(best, taken / calls), spent + taken
    return {"what": name, "per second": round(count / best), "goal": goal}


def sraven_split(task: SRaven, split: str, count: int) -> dict[str, Any]:
    """Ceiling, ambiguity and baselines of one split, on its first `count` puzzles; the prior is the split's own."""
    puzzles = task.raw(split, np.arange(count))["puzzles"]
    solutions = oracle.solve_split(task, split, puzzles)
    uninformed = oracle.solve(puzzles, task.num_values, task.permute, task.rule_ids)
    row: dict[str, Any] = {
        "split": split,
        "compositions": len(task.split_compositions[split]),
        "ceiling": solutions.ceiling,
        "± 1 s.e.": float(solutions.best_probability.std(ddof=1) / np.sqrt(count)),
        "ambiguous": solutions.ambiguous,
        "random choice among the answers": solutions.random_choice,
        "mean number of explanations": float(solutions.explanations.mean()),
        "most probable answer": score_sraven(task, puzzles, solutions.best)["accuracy"],
        "most probable answer, prior of all multisets": score_sraven(task, puzzles, uninformed.best)["accuracy"],
    }
    for name, answer in SRAVEN_BASELINES.items():
        scores = score_sraven(task, puzzles, answer(task, puzzles))
        row[name] = scores["accuracy"]
        row[f"{name}, per feature"] = scores["feature_accuracy"]
    return row


def logic_split(task: FuzzyLogic, split: str, count: int) -> dict[str, Any]:
    """R² of the baselines of one split, on its first `count` sequences."""
    row: dict[str, Any] = {"split": split, "compositions": len(task.split_compositions[split])}
    sums: dict[str, dict[str, float]] = {name: {} for name in LOGIC_BASELINES}
    for index in range(-(-count // 1000)):
        batch = task.sample(split, index, 1000)
        for name, predict in LOGIC_BASELINES.items():
            add_sums(sums[name], task.score(predict(task, batch.x), batch))
    for name, total in sums.items():
        metrics = task.metrics(total)
        row[f"{name}, R²"] = metrics["r2"]
        row[f"{name}, pooled R²"] = metrics["pooled_r2"]
    return row


def shared_rows(sraven: SRaven, logic: FuzzyLogic, count: int) -> list[dict[str, Any]]:
    """Identical instances between splits, in the paper's settings and in small ones."""
    rows = []
    settings: list[tuple[str, Task]] = [("sraven (paper)", sraven), ("logic (paper)", logic)]
    settings += [(f"sraven ({task.num_features} features, {task.num_values} values)", task) for task in SMALL]
    for name, task in settings:
        for pair, shared in num_shared(task, count).items():
            rows.append({"task": name, "splits": ", ".join(pair), "in both": shared})
    return rows


def num_shared(task: Task, count: int) -> dict[tuple[str, str], int]:
    """For each pair of splits how many of the second's first `count` instances occur among the first's."""
    keys = {split: _keys(task, split, count) for split in task.splits}
    return {pair: int(np.isin(keys[pair[1]], keys[pair[0]]).sum()) for pair in itertools.combinations(keys, 2)}


def _keys(task: Task, split: str, count: int) -> np.ndarray:
    parts = []
    for start in range(0, count, 20_000):
        numbers = np.arange(start, min(start + 20_000, count))
        if isinstance(task, SRaven):
            cells = task.raw(split, numbers)["puzzles"].reshape(len(numbers), -1)
        else:
            # Equal sequences have equal first and last points; these alone have 192 random bits.
            cells = task.instances(split, numbers).x[:, [0, -1]].flatten(1).numpy()
        cells = np.ascontiguousarray(cells)
        parts.append(cells.view(np.dtype((np.void, cells.shape[1] * cells.itemsize)))[:, 0])
    return np.concatenate(parts)


def _heading(name: str, options: Tasks) -> str:
    return {
        "speed": f"Speed, one core, batches of {options.batch_size} (best of many)",
        "sraven": f"SRAVEN, the paper's setting, {options.puzzles:,} puzzles per split: share answered right",
        "logic": "Fuzzy logic, the paper's setting: R²",
        "shared": f"Instances of the second split that also occur in the first, {options.overlap:,} of each",
    }[name]


def _table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns: a line for each row, or for each quantity if a row has many."""
    lines = [list(rows[0]), *([_number(value) for value in row.values()] for row in rows)]
    if len(rows[0]) > 5:
        lines = [list(line) for line in zip(*lines, strict=True)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [
            text.rjust(width) if k else text.ljust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(line) for line in padded)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
