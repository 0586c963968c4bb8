"""Which compositions are held out: a division that the seed decides, in which every part occurs in training."""

import numpy as np

from headcode.tasks.streams import Stream

# A random division that must cover every part is redrawn at most this often before we say that it cannot be made.
MAX_REDRAWS = 2000
# … and less often where there are many compositions, so that nobody waits for minutes: so many in all draws together.
MAX_DRAWN = 10_000_000
MAX_COMPOSITIONS = 1_000_000


def whole_share(share: float, count: int) -> int:
    """How many of `count` things a share is, rounded down; 0.29 of 100 is 29 in spite of binary fractions."""
    return int(share * count + 1e-9)


def check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is a share and must lie in 0..1, got {share}.")


def divide(
    stream: Stream, members: np.ndarray, parts: np.ndarray, num_held_out: int, *, part: str, cover_held_out: bool
) -> np.ndarray:
    """Which of the compositions are held out, drawn uniformly until every part occurs in training.

    members is (composition, n), the part ids of each composition, and parts lists the ids that must occur; the
    result is (composition,) with True for held out. With `cover_held_out` every part must occur among the held-out
    ones too.
    """
    count = len(members)
    held_out = np.zeros(count, dtype=bool)
    if num_held_out == 0:
        return held_out

    def covers(chosen: np.ndarray) -> bool:
        occurs = np.zeros(parts.max() + 1, dtype=bool)
        occurs[members[chosen]] = True
        return bool(occurs[parts].all())

    draws = min(MAX_REDRAWS, max(MAX_DRAWN // count, 10))
    for attempt in range(draws):
        held_out[:] = False
        held_out[stream.order(attempt, count)[:num_held_out]] = True
        if covers(~held_out) and (not cover_held_out or covers(held_out)):
            return held_out
    where = "both in training and held out" if cover_held_out else "in training"
    raise ValueError(
        f"Holding out {num_held_out} of {count} compositions, no split was found in which every {part} occurs {where} "
        f"({draws} draws tried): change held_out or the sizes of the task."
    )
