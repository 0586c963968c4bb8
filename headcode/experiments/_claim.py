"""What one row of the table of claims says."""

import dataclasses
from typing import Literal

Kind = Literal["claim", "opposite", "no difference", "no claim"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the table of claims."""

    item: str
    """The figure, table or section."""
    says: str
    """What the paper says there, in our words, with its numbers."""
    experiment: str = ""
    """Whose verdicts decide it; without one, `ours`, `word` and `page` say all."""
    tests: tuple[str, ...] = ()
    """Patterns of the statements that decide it; without any, all statements of the experiment."""
    kind: Kind = "claim"
    """What the tests state: the paper's claim; its opposite; what the paper sees no sign of; nothing that it claims."""
    ours: str = ""
    word: str = ""
    page: str = ""
    """Relative to the page of the table."""
    command: str = ""
