"""What answers to exported SRAVEN puzzles are worth, beside what the exact solver reaches on the same puzzles."""

from typing import Any

import numpy as np

from headcode.tasks import oracle
from headcode.tasks.answers import NO_ANSWER, Export
from headcode.tasks.intervals import share_of
from headcode.tasks.sraven_rules import RULE_NAMES
from headcode.tasks.variants import variant_puzzles

VERSION = 1
CHUNK = 4096


def score(export: Export, answers: np.ndarray) -> dict[str, Any]:
    """Shares of puzzles, or of features, with 95 % intervals; `answers` are (variant, instance, position).

    `solver` beside a share is that of the exact solver's most probable answers on the same puzzles or features.
    """
    task = export.task
    shape = (export.count, task.num_features)
    right: np.ndarray = np.zeros(answers.shape[:2], dtype=bool)
    by_feature: np.ndarray = np.zeros(shape, dtype=bool)
    solver, uninformed = by_feature.copy(), by_feature.copy()
    posterior, best = np.zeros(export.count), np.zeros(export.count)
    supported, several = (np.zeros(export.count, dtype=bool) for _ in range(2))
    rules = np.zeros(shape, dtype=np.int64)
    for first in range(0, export.count, CHUNK):
        part = slice(first, min(first + CHUNK, export.count))
        batch = task.instances(export.split, np.arange(export.start + first, export.start + part.stop))
        puzzles, instances = batch.info["puzzles"].numpy(), batch.info["instance"].numpy()
        truth = puzzles[:, -1, -1]
        for variant in range(export.variants):
            shown = variant_puzzles(task, puzzles, instances, variant)[:, -1, -1]
            right[variant, part] = (answers[variant, part] == shown).all(1)
        by_feature[part] = answers[0, part] == truth
        rules[part] = batch.info["token_rules"].numpy()[:, -task.num_features :]
        solutions = oracle.solve_split(task, export.split, puzzles)
        posterior[part] = solutions.probability_of(answers[0, part])
        supported[part] = solutions.supports(answers[0, part])
        best[part], several[part] = solutions.best_probability, solutions.num_answers > 1
        solver[part] = solutions.best == truth
        uninformed[part] = oracle.solve(puzzles, task.num_values, task.permute, task.rule_ids).best == truth

    numbers_right = by_feature.sum(1)

    def of_puzzles(chosen: np.ndarray) -> dict[str, Any]:
        return share_of(right[0][chosen]) | {"solver": share_of(solver.all(1)[chosen])["share"]}

    def of_features(asked: np.ndarray) -> dict[str, Any]:
        return share_of(by_feature, asked) | {"solver": share_of(solver, asked)["share"]}

    everything, ceiling, distinct = np.ones(shape, dtype=bool), float(best.mean()), _distinct(rules)
    found = {
        "headcode_score": VERSION,
        "split": export.split,
        "sha256": export.sha256,
        "puzzles": export.count,
        "features": task.num_features,
        "unreadable": int((answers == NO_ANSWER).any(-1).sum()),
        "accuracy": of_puzzles(everything[:, 0]),
        "ceiling": ceiling,
        "share_of_ceiling": _divided(share_of(right[0]), ceiling),
        "uninformed_solver": share_of(uninformed.all(1)),
        "posterior": share_of(posterior),
        "supported": share_of(supported),
        "one_answer": of_puzzles(~several),
        "several_answers": of_puzzles(several),
        "feature_accuracy": of_features(everything),
        "rules": {RULE_NAMES[rule]: of_features(rules == rule) for rule in task.rule_ids},
        "distinct_rules": {str(k): of_puzzles(distinct == k) for k in range(1, task.num_features + 1)},
        "features_right": {str(k): share_of(numbers_right == k) for k in range(task.num_features + 1)},
    }
    if export.variants > 1:
        passed = {"pass_any": np.any(right, axis=0), "pass_all": np.all(right, axis=0)}
        found |= {"variants": export.variants} | {name: share_of(hits) for name, hits in passed.items()}
    return found


def _distinct(rules: np.ndarray) -> np.ndarray:
    """(N,): how many different rules each puzzle has."""
    changes = np.diff(np.sort(rules, axis=1), axis=1) != 0
    return 1 + changes.sum(1)


def _divided(share: dict[str, Any], by: float) -> dict[str, Any]:
    return share | {name: share[name] / by for name in ("share", "low", "high")}
