"""Train a model on a task, into a run folder. The same command again goes on where it stopped.

Example: headcode train logic --preset logic-small --method hyla --out runs/first
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import shutil
import sys
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from headcode.cli._training import Switch, Trackers, carry_out, print_json
from headcode.files import parse_json
from headcode.presets import DEFAULT_PRESETS, PRESETS, preset, preset_of, presets_of
from headcode.run import RunConfig, field_type, fields_of, get_field, override, owner_of
from headcode.suggest import no_such
from headcode.train import Runtime, Trainer
from headcode.train.cost import step_flops
from headcode.train.distributed import is_main_process
from headcode.train.progress import duration

PROBE_SECONDS = 3.0
GROUPS: dict[str | None, tuple[str, str, str]] = {
    None: ("of_run", "run", "How long it trains, what is evaluated and saved."),
    "task": ("of_task", "task", "What is learned, and what is held out."),
    "model": ("of_model", "model", "The model and its attention."),
    "optimization": ("of_optimiser", "optimiser", "How weights are updated."),
}
"""Section of the configuration -> attribute of the command, title in --help, explanation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(Trackers):
    """What a training command says beyond the configuration. The fields of the configuration are added by `parse`."""

    preset: str
    """The configuration to start from."""
    out: Path | None = None
    """The run folder; runs/PRESET-METHOD-seedN unless given."""
    dry_run: Switch = False
    """Print the resolved configuration and its cost (a 3-second probe), and write nothing."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""
    threads: int | None = None
    """CPU threads; torch's choice unless given."""
    compile: Switch = False
    """torch.compile the model: pays off in long runs, most of all on GPUs."""
    fsdp: Switch = False
    """With many processes, shard weights and optimiser state over them (FSDP2) instead of replicating (DDP)."""

    def config(self) -> RunConfig:
        start = preset(self.preset)
        groups = (vars(getattr(self, attribute)) for attribute, _, _ in GROUPS.values())
        given = {name: value for group in groups for name, value in group.items()}
        if given["task_seed"] is None:
            given.pop("task_seed")
        for name, value in given.items():
            if _as_text(field_type(start, name)) and isinstance(value, str):
                given[name] = _from_text(name, value)
        return override(start, **{k: v for k, v in given.items() if v != get_field(start, k) or k == "task_seed"})

    def run(self) -> None:
        config = self.config()
        runtime = Runtime(device=self.device, threads=self.threads, compile=self.compile, fsdp=self.fsdp)
        if self.dry_run:
            report = {"config": config.to_dict(), "cost": self.cost(config, runtime)}
            if is_main_process():
                print_json(report)
            return
        config = self.ready(config)
        out = Path("runs") / f"{self.preset}-{config.model.method}-seed{config.seed}" if self.out is None else self.out
        carry_out(config, out, runtime, self)

    def cost(self, config: RunConfig, runtime: Runtime) -> dict[str, Any]:
        return cost(config, runtime)

    def ready(self, config: RunConfig) -> RunConfig:
        """What is left to do before training, for tasks that need data."""
        return config


def cost(config: RunConfig, runtime: Runtime) -> dict[str, Any]:
    """Parameters, arithmetic and time of a run; the time from a short probe on this machine."""
    trainer = Trainer(config, runtime=runtime)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    flops = step_flops(config)
    speed = trainer.probe(PROBE_SECONDS)
    return {
        "parameters": parameters,
        "flops_per_step": flops,
        "steps_per_second": round(speed, 3),
        "estimated_seconds": round(config.steps / speed, 1),
        "estimated_time": duration(config.steps / speed),
    }


def parse(arguments: Sequence[str]) -> TrainOptions:
    """The command for these arguments: its flags are the fields of the preset's configuration, with its values."""
    from headcode.cli import parse_with_tyro

    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0)
    task = arguments[0]
    if task not in DEFAULT_PRESETS:
        raise ValueError(no_such("There is no task", task, DEFAULT_PRESETS, "the tasks are"))
    arguments = _current_flags(arguments)
    name = _given_preset(arguments) or DEFAULT_PRESETS[task]
    options = _command_class(preset_of(task, name), name)
    command = parse_with_tyro(options, f"train {task}", __doc__ or "", list(arguments[1:]))
    assert isinstance(command, TrainOptions)
    return command


def _command_class(config: RunConfig, name: str) -> type:
    presets = f"The configuration to start from: {', '.join(presets_of(config.task.name))}."
    annotated: Any = Annotated  # with types that are known at run time alone
    flags: dict[str | None, list[Any]] = {section: [] for section in GROUPS}
    for flag, (section, _) in fields_of(config).items():
        default = get_field(config, flag)
        kind = field_type(config, flag)
        if flag == "task_seed":
            kind, default = int | None, None
        elif _as_text(kind):
            kind, default = str, json.dumps(default)
        # Without its group's name before it: --dim, not --model.dim.
        shown: Any = annotated[kind, tyro.conf.OmitArgPrefixes, tyro.conf.arg(help=_help(config, flag))]
        flags[section].append((flag, shown, dataclasses.field(default=default)))
    # The dataclasses are made anew for each preset, so that --help shows the values that it has.
    fields: list[Any] = [("preset", Annotated[str, tyro.conf.arg(help=presets)], dataclasses.field(default=name))]
    for section, (attribute, title, words) in GROUPS.items():
        group = dataclasses.make_dataclass(title, flags[section], frozen=True, kw_only=True)
        annotation = annotated[group, tyro.conf.arg(name=title, help=words)]
        fields.append((attribute, annotation, dataclasses.field(default_factory=group)))
    base: type = TrainOptions
    if config.task.reads_text:
        from headcode.cli._language import LanguageOptions as base
    return dataclasses.make_dataclass("Command", fields, bases=(base,), frozen=True, kw_only=True)


def _as_text(kind: Any) -> bool:
    """Whether a field's values are written as JSON: tuples of tuples have no flag of their own."""
    return any(
        _as_text(part) or (typing.get_origin(kind) is tuple and typing.get_origin(part) is tuple)
        for part in typing.get_args(kind)
    )


def _from_text(name: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} takes JSON, for example 0.5 or [[0, 1], [1000, 0]].") from None


def _help(config: RunConfig, name: str) -> str:
    if name == "task_seed":
        return "The task's seed: which compositions are held out, and all data; the value of --seed unless given."
    owner, field = owner_of(config, name)
    return _field_docstrings(typing.cast(Any, type(owner))).get(field, "")


@functools.cache
def _field_docstrings(cls: Any) -> dict[str, str]:
    """The string under each field of a configuration."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" not in vars(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in itertools.pairwise(body.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = " ".join(words.split())
    return found


def _current_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments with flags of renamed fields under their names of today."""
    found = list(arguments)
    for former, name in RunConfig.former_names.items():
        before, now = (f"--{word.replace('_', '-')}" for word in (former, name))
        for index, argument in enumerate(found):
            flag, equals, value = argument.partition("=")
            if flag == before:
                print(f"headcode: {before} is called {now} now.", file=sys.stderr)
                found[index] = now + equals + value
    return found


def _given_preset(arguments: Sequence[str]) -> str | None:
    given = None  # as with every flag, the last one counts
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == "--preset":
            given = following
        elif argument.startswith("--preset="):
            given = argument.removeprefix("--preset=")
    return given


def _overview() -> str:
    sentence, example = (__doc__ or "").strip().split("\n\n")
    longest = max(map(len, PRESETS))
    columns = shutil.get_terminal_size().columns
    presets = [
        textwrap.fill(
            f"  {name:<{longest}}  {(function.__doc__ or '').strip()}", columns, subsequent_indent=" " * (longest + 4)
        )
        for name, function in PRESETS.items()
    ]
    return "\n".join(
        [
            f"usage: headcode train {{{','.join(DEFAULT_PRESETS)}}} [--preset P] [--method M]",
            "                      [--steps N] [--seed S] [--out DIR] …",
            "",
            *textwrap.wrap(sentence, columns),
            "",
            *example.splitlines(),
            "",
            "presets:",
            *presets,
            "",
            "headcode train TASK --help shows every flag of a task.",
        ]
    )
