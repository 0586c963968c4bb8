"""Go on with a run from its last checkpoint, or from step 0 if it has none yet.

Device, threads and compilation are those that the run was started with, unless given: its bits depend on them.

Example: headcode resume runs/first
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from headcode.cli._training import Trackers, carry_out

if TYPE_CHECKING:  # the help of a command needs no torch
    from headcode.train import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Trackers):
    """Arguments of `headcode resume`."""

    run_folder: tyro.conf.Positional[Path]
    """The run folder."""
    device: str | None = None
    """auto, cpu, cuda, cuda:1, mps; as before unless given."""
    threads: int | None = None
    """CPU threads; as before unless given."""
    compile: bool | None = None
    """torch.compile the model; as before unless given."""
    fsdp: bool | None = None
    """Shard over many processes; as before unless given."""

    def run(self) -> None:
        from headcode.train.checkpoint import find_run
        from headcode.train.folder import read_run_config

        if find_run(self.run_folder) != self.run_folder:
            raise ValueError(f"{self.run_folder} is a model of the zoo: its training has ended, and is not resumed.")
        config = read_run_config(self.run_folder)
        carry_out(config, self.run_folder, self._runtime(), self)

    def _runtime(self) -> "Runtime":
        from headcode.train import Runtime
        from headcode.train.folder import ENVIRONMENT_FILE, read_environments

        starts = read_environments(self.run_folder)
        before: dict[str, Any] = {}
        if starts and "runtime" in starts[-1]:
            before = {**starts[-1]["runtime"], "threads": starts[-1].get("threads")}
        given = {name: getattr(self, name) for name in ("device", "threads", "compile", "fsdp")}
        try:
            runtime = Runtime.from_dict(before)
        except ValueError as error:
            raise ValueError(f"{self.run_folder / ENVIRONMENT_FILE} has no valid runtime: {error}") from None
        return runtime.replace(**{name: value for name, value in given.items() if value is not None})
