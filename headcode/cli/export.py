"""Write any split of a task to a file for other tools, with a card that says exactly what it is.

Example: headcode export sraven --split compositional --count 10000 --out sraven.parquet

Prompts for language models: headcode export sraven --format text --count 200 --out prompts.jsonl
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from headcode.cli._task_options import Count, TaskOptions, with_task_flags
from headcode.tasks.export import FORMATS, card_path, export


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(TaskOptions):
    split: str = "compositional"
    """train, iid, compositional, or novel (fuzzy logic)."""
    count: Count = 1000
    """How many instances."""
    start: Count = 0
    """Number of the first one."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """The file; by default TASK-SPLIT with the format's ending."""
    format: Annotated[
        Literal["parquet", "jsonl", "npz", "text"] | None,
        tyro.conf.arg(metavar="{parquet,jsonl,npz,text}", help_behavior_hint="(optional)"),
    ] = None
    """By default what the file's ending says, else jsonl."""
    variants: Count = 1
    """SRAVEN: show each puzzle so many times, under other names of features and values."""
    oracle: bool = False
    """SRAVEN: add the number of supported answers and their posteriors to each puzzle."""

    def run(self) -> None:
        task = self.make_task()
        format = self.format or self._format_of_name()
        out = self.out or Path(f"{self.task}-{self.split}{FORMATS[format]}")
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            work = bar.add_task(f"writing {out.name}", total=self.count)
            card = export(
                task,
                self.split,
                self.count,
                out,
                format,
                self.start,
                with_oracle=self.oracle,
                num_variants=self.variants,
                progress=lambda done: bar.advance(work, done),
            )
        print(f"wrote {self.count:,} instances to {out} ({out.stat().st_size:,} bytes)")
        print(f"card  {card_path(out)}")
        print(f"hash  {card['sha256']}")

    def _format_of_name(self) -> str:
        if self.out is None:
            return "jsonl"
        for format in ("parquet", "jsonl", "npz"):
            if self.out.suffix.lower() == FORMATS[format]:
                return format
        raise ValueError(f"{self.out.name!r} ends in none of .parquet, .jsonl, .npz: say --format {'|'.join(FORMATS)}.")


Command = with_task_flags(Export)
