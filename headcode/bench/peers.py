"""Training steps of headcode and of its peers in one table, with the limit that the cores set.

Everybody trains the same sizes in one process, in turns, and the median step counts. A peer whose package is missing
is left out, and the table says what to install. About five minutes on two cores, a third of it torch.compile.

Example: headcode bench peers --out docs/bench-peers.md
"""

import contextlib
import dataclasses
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headcode.bench import lm
from headcode.bench.measure import aligned_table, check_words, machine, timed, torch_threads
from headcode.bench.peaks import measured_peaks
from headcode.bench.peer_models import CannotCompile, Compiled, Sdpa, XTransformers, fresh_compiler
from headcode.bench.train import Ours, Plain, setting
from headcode.files import replace_file
from headcode.run import RunConfig
from headcode.tasks import Batch
from headcode.train.cost import step_flops
from headcode.train.runtime import keep_freed_memory

OURS = "headcode"
TITLES = ("model", "method", "ms", "× ours", "GFLOP/s", "of peak")
TASKS = {"sraven": "SRAVEN", "logic": "Fuzzy logic", "lm": "Language model"}
PEERS = ("eager", "compile", "sdpa", "x-transformers", "llama")
AUTHORS = {
    "sraven": {"hyla": 5.7, "softmax": 3.3, "linear": 3.4},
    "logic": {"hyla": 4.2, "softmax": 3.2, "linear": 3.4},
}
"""The time of the authors' JAX step in steps of ours, both in turns in one run, on 2 cores of a Zen 4."""


class Side(NamedTuple):
    """Who takes part in a task's turns: a name, the method it trains and how its step is made."""

    name: str
    method: str
    make: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Peers:
    """headcode, eager PyTorch, torch.compile, PyTorch's SDPA, x-transformers and a Hugging Face Llama."""

    tasks: tuple[str, ...] = ("sraven", "logic", "lm")
    """sraven (×1 model), logic (N=16), lm (the sizes of `headcode bench lm`)."""
    methods: tuple[str, ...] = ("hyla", "softmax", "linear")
    """hyla, softmax, linear; a peer takes part where it has the method."""
    peers: tuple[str, ...] = PEERS
    """Who is compared: eager, compile, sdpa, x-transformers, llama; none leaves ours alone."""
    rounds: int = 5
    """Turns of everybody; the median step of each counts."""
    seconds: float = 0.4
    """Time of one turn, at least three steps."""
    batch_size: int = 128
    """Instances of a puzzle's step; a language model's step has 16 sequences."""
    threads: int | None = None
    """CPU threads; torch's choice unless given."""
    out: Path | None = None
    """Also write the tables to this Markdown file."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        counts = (self.rounds, self.batch_size, 1 if self.threads is None else self.threads)
        if min(counts) < 1 or not self.seconds > 0:
            raise ValueError("--rounds, --batch-size and --threads must be 1 or more, and --seconds above 0.")
        check_words("tasks", self.tasks, TASKS)
        check_words("methods", self.methods, AUTHORS["sraven"])
        check_words("peers", self.peers, PEERS)
        if self.out is not None:  # before minutes are spent on what could not be written
            self.out.parent.mkdir(parents=True, exist_ok=True)
        keep_freed_memory()  # for everybody, although only ours would have it
        with torch_threads(self.threads):
            found = self.measure()
            text = report(found)
            print(json.dumps(found) if self.json else text)
            if self.out is not None:
                replace_file(self.out, text.encode())

    def measure(self) -> dict[str, Any]:
        """The limits, the rows, what torch.compile took and who was left out: what `--json` prints."""
        tasks, peaks = [], [measured_peaks()]
        for task in self.tasks:
            tasks.append(self._measure_task(task))
            peaks.append(measured_peaks())
        limits = {name: max(peak[name] for peak in peaks) / 1e9 for name in peaks[0]}
        rows = [finished(row, limits["float32"]) for part in tasks for row in part["rows"]]
        rows += [row for task in self.tasks for row in authors_rows(task, self.methods)]
        parts = [{name: part[name] for name in part if name != "rows"} for part in tasks]
        return {"machine": machine(), "rounds": self.rounds, "limits": limits, "tasks": parts, "rows": rows}

    def _measure_task(self, task: str) -> dict[str, Any]:
        configs = {method: self._config(task, method) for method in self.methods}
        steps: dict[tuple[str, str], Callable[[], None]] = {}
        compiled: dict[str, float] = {}
        left_out: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(fresh_compiler())
            for side in self._sides(task, configs, stack):
                if side.name in left_out:
                    continue
                try:
                    made = side.make()
                    made.step()
                    made.step()
                except (ModuleNotFoundError, CannotCompile) as error:
                    left_out[side.name] = str(error)
                    say(f"{TASKS[task]}: {side.name} is left out: {error}")
                    continue
                steps[side.name, side.method] = made.step
                if isinstance(made, Compiled):
                    compiled[side.method] = made.compile_seconds
                say(f"{TASKS[task]}: {side.name}, {side.method}: ready")
            taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
            for turn in range(self.rounds):
                start = time.perf_counter()
                for key, step in steps.items():
                    taken[key] += timed(step, self.seconds, fewest=3)
                say(f"{TASKS[task]}: turn {turn + 1} of {self.rounds}, {time.perf_counter() - start:.0f} s")
        seconds = {key: statistics.median(each) for key, each in taken.items()}
        rows = [
            {
                "task": task,
                "model": name,
                "method": method,
                "ms": 1000 * median,
                "times_ours": median / seconds[OURS, method],
                "gflops": step_flops(configs[method]) / median / 1e9,
                "measured": True,
            }
            for (name, method), median in seconds.items()
        ]
        title = describe(task, configs[self.methods[0]])
        reasons = list(dict.fromkeys(left_out.values()))
        return {"task": task, "title": title, "rows": rows, "compile_seconds": compiled, "left_out": reasons}

    def _config(self, task: str, method: str) -> RunConfig:
        return lm.Lm().config(method) if task == "lm" else setting(task, method, self.batch_size)

    def _sides(self, task: str, configs: dict[str, RunConfig], stack: contextlib.ExitStack) -> Iterator[Side]:
        some = next(iter(configs.values()))
        if task == "lm":
            x, y, _ = lm.random_tokens(lm.Lm(), some.model)
            batch = Batch(x, y, {})
        else:
            batch = some.task.sample("train", 0, some.batch_size)

        def ours(method: str) -> Any:
            return lm.Ours(lm.Lm(), method) if task == "lm" else stack.enter_context(Ours(configs[method]))

        def x_transformers(method: str, flash: bool) -> Callable[[], Any]:
            return lambda: XTransformers(configs[method], batch, flash)

        for method, config in configs.items():
            yield Side(OURS, method, lambda method=method: ours(method))  # type: ignore[misc]
            if "eager" in self.peers:
                yield Side("PyTorch, eager", method, lambda config=config: Plain(config, batch))  # type: ignore[misc]
            if "compile" in self.peers:
                yield Side("torch.compile", method, lambda config=config: Compiled(config, batch))  # type: ignore[misc]
        if "sdpa" in self.peers and "softmax" in configs:
            yield Side("PyTorch, SDPA", "softmax", lambda: Sdpa(configs["softmax"], batch))
        if "x-transformers" in self.peers:
            if "softmax" in configs:
                yield Side("x-transformers", "softmax", x_transformers("softmax", False))
                yield Side("x-transformers, flash", "softmax", x_transformers("softmax", True))
            if "linear" in configs:
                yield Side("x-transformers", "linear", x_transformers("linear", False))
        if task == "lm" and "llama" in self.peers and "softmax" in configs:
            yield Side(lm.LLAMA, "softmax", lambda: lm.Llama(lm.Lm()))


def say(line: str) -> None:
    """A line of progress, apart from the table."""
    print(line, file=sys.stderr, flush=True)


def describe(task: str, config: RunConfig) -> str:
    """The sizes that everybody has."""
    model = config.model
    length = config.task.sequence_length
    return (
        f"T={length}, batch {config.batch_size}, width {model.dim}, {model.num_layers} layers, "
        f"{model.num_heads} heads, qk {model.qk_dim}, v {model.v_dim}, mlp {model.mlp_dim}."
    )


def finished(row: dict[str, Any], peak: float) -> dict[str, Any]:
    return {**row, "peak_share": row["gflops"] / peak}


def authors_rows(task: str, methods: tuple[str, ...]) -> list[dict[str, Any]]:
    """What is known of the authors' step, which is not measured here."""
    ratios = AUTHORS.get(task, {})
    unknown = {"ms": None, "gflops": None, "peak_share": None, "measured": False}
    return [
        {"task": task, "model": "authors' JAX†", "method": method, "times_ours": ratios[method], **unknown}
        for method in methods
        if method in ratios
    ]


def report(found: dict[str, Any]) -> str:
    """The tables in Markdown, one for each task."""
    limits = " and ".join(f"{speed:.0f} GFLOP/s in {name}" for name, speed in found["limits"].items())
    lines = wrapped(
        f"Training steps of headcode and its peers, in one process, in turns: {found['machine']}, medians of "
        f"{found['rounds']} turns; `headcode bench peers`. The limit: large matrix products reach {limits}."
    )
    for part in found["tasks"]:
        rows = [row for row in found["rows"] if row["task"] == part["task"]]
        order = list(dict.fromkeys(row["method"] for row in rows))
        rows.sort(key=lambda row: order.index(row["method"]))  # stable: within a method, in the order of turns
        lines += ["", f"## {TASKS[part['task']]}", "", *wrapped(part["title"]), ""]
        lines += aligned_table(TITLES, map(cells, rows), words=2)
        if part["compile_seconds"]:
            taken = ", ".join(f"{seconds:.0f} s ({method})" for method, seconds in part["compile_seconds"].items())
            lines += ["", *wrapped(f"torch.compile took {taken}, from an empty cache.")]
        for reason in part["left_out"]:
            lines += ["", *wrapped(f"Left out: {reason}")]
    return "\n".join([*lines, "", NOTES])


NOTES = """\
"× ours" is the time in steps of headcode with the same method. GFLOP/s count
what a step needs (2 per multiply-add, backward = 2 × forward, the last layer
only where it is read), whoever computes more; "of peak" is their share of the
float32 limit, the faster of torch's own product and oneDNN's.

Ours is the step of `headcode train`, batches and gradient norm included; the
peers' batches cost nothing. Eager is the same model on the reference backend
with separate projections and torch's AdamW; torch.compile is that model, block
by block; SDPA is softmax with one projection and the T5 band as a dense mask.
x-transformers has its own T5 bias, which it refuses beside `flash`: those rows
have no position bias in puzzles, and rotary positions in language models. It
has no linear attention of its own: `linear` is its `attn_custom_attn_fn` with
the scores as they are. SDPA and x-transformers train without the dropout of
attention that the others have in puzzles, and which would slow them down.

† Not measured here: ratios of earlier runs on 2 cores of a Zen 4 processor, in
turns with the step that headcode had then
([arXiv:2406.05816](https://arxiv.org/abs/2406.05816) names the authors' code).
"""


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 80, break_long_words=False, break_on_hyphens=False)


def cells(row: dict[str, Any]) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        row["model"],
        row["method"],
        number(row["ms"], ".1f"),
        number(row["times_ours"], ".2f") + "×",
        number(row["gflops"], ".0f"),
        number(row["peak_share"], ".0%"),
    ]
