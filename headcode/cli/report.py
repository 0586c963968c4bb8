"""One self-contained HTML page about a run, or comparing several: curves, scores, codes, interventions, settings.

Example: headcode report runs/first --out report.html
         headcode report zoo/logic-softmax zoo/logic-linear zoo/logic-hyla
"""

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Command:
    """Arguments of `headcode report`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or zoo/NAME; all of one task."""
    out: Path = Path("report.html")
    """The page to write."""

    def run(self) -> None:
        from headcode.files import temporary_folder
        from headcode.report.runs import report_runs

        if not self.runs:
            raise ValueError("Give at least one run folder, for example: headcode report zoo/logic-hyla.")
        if self.out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"The page's name ends in .html, got {self.out.name!r}.")
        with temporary_folder("report") as pictures:
            print(f"wrote {report_runs(self.runs, self.out, pictures)}")
