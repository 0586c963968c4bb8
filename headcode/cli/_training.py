"""What the commands that train have in common: reporters, plain words about failures, and the last lines."""

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import tyro

if TYPE_CHECKING:  # the help of a command needs no torch
    from headcode.run import RunConfig
    from headcode.train import Reporter, RunResult, Runtime

_show_warning = warnings.showwarning
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trackers:
    """Where metrics go besides the run folder."""

    tensorboard: Switch = False
    """Also write TensorBoard files to RUN/tensorboard (needs the extra headcode[tensorboard])."""
    wandb: Switch = False
    """Also log to Weights & Biases (needs the extra headcode[wandb]); WANDB_MODE=offline keeps it here."""

    def reporters(self, out: Path, config: "RunConfig") -> list["Reporter"]:
        from headcode.train.progress import TensorBoardReporter, WandbReporter, terminal_reporter

        chosen: list[Reporter] = [terminal_reporter()]
        if self.tensorboard:
            chosen.append(TensorBoardReporter(out))
        if self.wandb:
            chosen.append(WandbReporter(out, config))
        return chosen


def carry_out(config: "RunConfig", out: Path, runtime: "Runtime", trackers: Trackers) -> None:
    """Train, and end the process as its user would expect: 1 after a failure, 128 + signal after a signal."""
    from headcode.train import Trainer, TrainingFailed, TrainingInterrupted
    from headcode.train.distributed import is_main_process, started_by_torchrun

    warnings.showwarning = say_warning
    try:
        reporters = trackers.reporters(out, config) if is_main_process() else []
        result = Trainer(config, out, runtime=runtime, reporters=reporters).run()
    except (TrainingFailed, TrainingInterrupted) as end:
        code = 128 + end.signal_number if isinstance(end, TrainingInterrupted) else 1
        if not is_main_process():
            raise SystemExit(code) from None
        _end(str(end), code)
    except RuntimeError as error:
        if not started_by_torchrun() or not any(word in str(error).lower() for word in ("gloo", "nccl")):
            raise
        _end(f"The connection to another process of the group was lost ({str(error).splitlines()[0][:120]} …).", 1)
    except ValueError:
        # Every process finds the same mistake; one of them says so.
        if not is_main_process():
            raise SystemExit(2) from None
        raise
    if is_main_process():
        print(summary(config, out, result))


def summary(config: "RunConfig", out: Path, result: "RunResult") -> str:
    """The last evaluation, split by split, and where everything is."""
    last = [r for r in result.metrics if r["kind"] == "eval" and r["step"] == result.step]
    lines = [f"{config.model.method} on {config.task.name}, seed {config.seed}, {result.step} steps"]
    for record in last:
        numbers = {name: value for name, value in record.items() if name not in ("kind", "step", "split")}
        lines.append(f"  {record['split']:<14}" + metrics_line(numbers))
    lines.append(f"{out}  (evaluate it with: headcode eval {out})")
    return "\n".join(lines)


def metrics_line(metrics: dict[str, Any]) -> str:
    shown = (f"{name} {'?' if value is None else format(value, '.4f')}" for name, value in metrics.items())
    return "  ".join(shown)


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2, allow_nan=False))


def _end(sentence: str, code: int) -> NoReturn:
    print(f"headcode: {sentence}", file=sys.stderr)
    raise SystemExit(code)


def say_warning(message: Warning | str, category: type[Warning], *details: Any, **more: Any) -> None:
    """Our own warnings as plain sentences, those of others as they are."""
    from headcode.train.runtime import RunWarning

    if issubclass(category, RunWarning):
        print(f"headcode: {message}", file=sys.stderr)
    else:
        _show_warning(message, category, *details, **more)
