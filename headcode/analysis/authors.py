"""The codes that the paper's authors take, as options of `capture`, beside ours.

SRAVEN: puzzles without permutations, and of each the codes that the last answering token gives to its own feature in
the other panels of its row; ours are the codes of every answering token to itself, on puzzles as in training. Fuzzy
logic: one query point for all functions, and the code of the answering token to itself.
"""

import dataclasses
from typing import Any

from headcode.analysis.runs import OpenRun
from headcode.run import with_task


def as_authors(run: OpenRun) -> tuple[OpenRun, dict[str, Any]]:
    """The run on the authors' kind of instances, and the queries and keys whose codes they take.

    >>> from pathlib import Path
    >>> from headcode.analysis.runs import untrained_model
    >>> from headcode.presets import preset
    >>> config = preset("sraven-small")
    >>> run, pairs = as_authors(OpenRun(Path("."), config, untrained_model(config), 0))
    >>> run.task.permute, pairs
    (False, {'queries': [17], 'keys': [13, 15]})
    """
    changed, pairs = run.task.as_authors()
    return dataclasses.replace(run, config=with_task(run.config, changed)), pairs
