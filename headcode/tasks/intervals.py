"""Shares with their 95 % intervals, also of trials that come in groups, such as the features of one puzzle."""

from typing import Any

import numpy as np


def wilson_interval(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `count` trials: sensible for few trials and for shares of 0 and 1.

    >>> [round(bound, 3) for bound in wilson_interval(0.0, 49)]
    [0.0, 0.073]
    """
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)


def share_of(hits: np.ndarray, asked: np.ndarray | None = None) -> dict[str, Any]:
    """The share of hits (N,) or (N, feature) with its interval and count; None where nothing was asked.

    `asked` (N, feature) says which features count. Features of one puzzle are right or wrong together more often than
    not, so the interval is that of puzzles drawn as a whole. Hits may also be probabilities; the share is their mean.
    """
    groups = hits.reshape(len(hits), -1).astype(float)
    counted = np.ones(groups.shape, dtype=bool) if asked is None else asked
    right, trials = (groups * counted).sum(1), counted.sum(1)
    count = int(trials.sum())
    if count == 0:
        return {"share": None, "low": None, "high": None, "count": 0}
    share = float(right.sum() / count)
    alone = share * (1 - share) / count
    together = float(((right - share * trials) ** 2).sum()) / count**2
    # Where every puzzle came out alike the data do not tell how features hang together: each puzzle then counts once.
    effective = count * alone / together if together else int((trials > 0).sum())
    low, high = wilson_interval(share, effective)
    return {"share": share, "low": low, "high": high, "count": count}
