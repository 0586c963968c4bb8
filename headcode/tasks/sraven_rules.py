"""SRAVEN's rules along a row: their names, ids and arithmetic, all modulo the number of values."""

import numpy as np

RULE_NAMES = ("constant", "+1", "+2", "-1", "-2", "sum", "difference", "distribute")
DISTRIBUTE = 7
STEPS = (0, 1, 2, -1, -2)
"""What constant and the progressions add from cell to cell."""


def apply_rule(cells: list[int], rule: int, num_values: int) -> int:
    """What a rule gives in the last column, from the earlier cells of a row.

    >>> [apply_rule([3, 5], rule, 8) for rule in range(7)]
    [5, 6, 7, 4, 3, 0, 6]
    """
    if rule == DISTRIBUTE:
        raise ValueError("What distribute gives is not determined by one row.")
    if rule < len(STEPS):
        return (cells[-1] + STEPS[rule]) % num_values
    return (sum(cells) if rule == 5 else cells[0] - sum(cells[1:])) % num_values


def check_rules(rules: tuple[int, ...] | None, num_values: int, grid: int) -> tuple[int, ...]:
    """The rule ids in use, ascending, or one clear sentence."""
    everything = tuple(range(len(RULE_NAMES)))
    if rules is not None and not all(isinstance(rule, (int, np.integer)) for rule in rules):
        raise ValueError(f"rules must be whole numbers, got {tuple(rules)}.")
    if rules is not None and (not rules or len(set(rules)) != len(rules) or not set(rules) <= set(everything)):
        raise ValueError(f"rules must be distinct ids out of {everything}, at least one, got {tuple(rules)}.")
    chosen = everything if rules is None else tuple(sorted(rules))
    if DISTRIBUTE in chosen and num_values < grid:
        raise ValueError(
            f"The rule distribute ({DISTRIBUTE}) needs as many values as columns, got num_values={num_values} and "
            f"grid={grid}: use more values, or leave it out with rules=(0, 1, 2, 3, 4, 5, 6)."
        )
    return chosen
