"""Tables for a terminal: aligned columns; those that do not fit go into a second table below, with the first again."""

import shutil
import sys
from collections.abc import Mapping, Sequence

GAP = "  "


def aligned_table(columns: Mapping[str, Sequence[str]], width: int | None = None) -> str:
    """Named columns of cells as text.

    `width` is the terminal's unless given; a file or a pipe gets whole lines.

    >>> print(aligned_table({"method": ["hyla", "linear"], "iid": ["0.9", "0.88"], "novel": ["–", "0.1"]}, width=13))
    method   iid
    hyla     0.9
    linear  0.88
    <BLANKLINE>
    method  novel
    hyla        –
    linear    0.1
    """
    if not columns or not next(iter(columns.values())):
        return "(no rows)"
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    first, *others = ([*_aligned(name, cells)] for name, cells in columns.items())
    blocks: list[list[list[str]]] = [[first]]
    for column in others:
        taken = sum(len(part[0]) + len(GAP) for part in blocks[-1])
        if width is not None and len(blocks[-1]) > 1 and taken + len(column[0]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    return "\n\n".join("\n".join(GAP.join(line).rstrip() for line in zip(*block, strict=True)) for block in blocks)


def _aligned(name: str, cells: Sequence[str]) -> list[str]:
    """The column's lines, padded to one width: numbers on the right, words on the left."""
    width = max(map(len, (name, *cells)))
    words = any(not _is_number(cell) for cell in cells)
    return [text.ljust(width) if words else text.rjust(width) for text in (name, *cells)]


def _is_number(cell: str) -> bool:
    """A number, a mean with its interval, or a dash for none."""
    try:
        return bool([float(part) for part in cell.split(" ± ")])
    except ValueError:
        return cell == "–"
