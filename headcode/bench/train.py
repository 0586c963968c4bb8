"""How fast a training step is, against the same model in plain eager PyTorch; both in one run, in turns.

Plain is: the reference backend, every output of the last layer, separate q, k and v projections, torch's AdamW as it
comes, and batches that cost nothing. Ours is what `headcode train` does, batches included.

Example: headcode bench train --rounds 5 --out docs/bench-train.md
"""

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headcode.bench.measure import machine, markdown_table, timed, torch_threads
from headcode.bench.peaks import measured_peaks
from headcode.files import replace_file
from headcode.nn import HyperAttention, Transformer
from headcode.ops.cpu.launch import BoundProgram
from headcode.presets import preset
from headcode.run import RunConfig, override
from headcode.tasks import Batch
from headcode.train.cost import step_flops
from headcode.train.data import Prefetcher
from headcode.train.distributed import Group
from headcode.train.learner import Learner
from headcode.train.loss import prediction_loss
from headcode.train.randomness import seed_of
from headcode.train.runtime import Runtime, keep_freed_memory
from headcode.train.stopwatch import Stopwatch

GOALS = {("sraven", "hyla"): 3.5, ("logic", "hyla"): 3.2}
OTHER_GOALS = {"sraven": 2.5, "logic": 2.8}
TITLES = (
    "task",
    "method",
    "plain ms",
    "ours ms",
    "ratio",
    "goal",
    "matrix products",
    "attention kernels",
    "GFLOP/step",
    "GFLOP/s",
    "machine GFLOP/s",
    "data wait",
)
ATTENTION_LAUNCHES = ("attention", "delta", "sum of queries", "sum of bands")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclasses.dataclass(frozen=True)
class Train:
    """Training steps of the paper's settings: SRAVEN (×1 model) and fuzzy logic with N=16, batch 128."""

    tasks: tuple[str, ...] = ("sraven", "logic")
    """sraven, logic."""
    methods: tuple[str, ...] = ("hyla", "softmax", "linear")
    """Any of the methods."""
    rounds: int = 5
    """Turns of plain and ours; the median step of each counts."""
    seconds: float = 3.0
    """Time of one turn, at least three steps."""
    batch_size: int = 128
    threads: int | None = None
    """CPU threads; torch's choice unless given."""
    out: Path | None = None
    """Also write the table to this Markdown file."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        if self.rounds < 1 or self.seconds <= 0 or self.batch_size < 1:
            raise ValueError("--rounds and --batch-size must be 1 or more, and --seconds above 0.")
        keep_freed_memory()  # for both sides, although only ours would have it
        with torch_threads(self.threads):
            rows = [self._measure(task, method) for task in self.tasks for method in self.methods]
            print(json.dumps({"machine": machine(), "rows": rows}) if self.json else report(rows))
            if self.out is not None:
                replace_file(self.out, report(rows).encode())

    def _measure(self, task: str, method: str) -> dict[str, Any]:
        config = setting(task, method, self.batch_size)
        ours, plain = Ours(config), Plain(config)
        with ours:
            for side in (ours, plain):
                side.step()
                side.step()
            turns = [[timed(side.step, self.seconds, fewest=3) for side in (plain, ours)] for _ in range(self.rounds)]
            waited = ours.waited()
            shares = ours.profile()
        plain_seconds, seconds = (
            statistics.median(step for turn in side for step in turn) for side in zip(*turns, strict=True)
        )
        flops = step_flops(config)
        return {
            "task": task if task == "sraven" else f"{task} N={config.task.sequence_length}",
            "method": method,
            "plain_ms": 1000 * plain_seconds,
            "ours_ms": 1000 * seconds,
            "ratio": plain_seconds / seconds,
            "goal": GOALS.get((task, method), OTHER_GOALS[task]),
            "product_share": shares["products"],
            "attention_share": shares["attention"],
            "gflop": flops / 1e9,
            "gflops": flops / seconds / 1e9,
            "machine_gflops": measured_peaks()["float32"] / 1e9,
            "data_wait": waited,
        }


def setting(task: str, method: str, batch_size: int) -> RunConfig:
    if task not in ("sraven", "logic"):
        raise ValueError(f"--tasks must be of sraven and logic, got {task!r}.")
    changes = {"num_points": 16} if task == "logic" else {}
    return override(preset(task), method=method, batch_size=batch_size, **changes)


class Ours:
    """The training step of `headcode train`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.learner = Learner(config, Runtime(device="cpu"))
        self.learner.join(Group())
        self._prefetcher = Prefetcher(lambda step: [config.task.sample("train", step, config.batch_size)], 0, 2**62)
        self._count = 0

    def __enter__(self) -> "Ours":
        self._stack = contextlib.ExitStack()
        batches = self._stack.enter_context(self._prefetcher)
        self._stopwatch = Stopwatch(0)
        self._batches = self._stopwatch.waiting(batches)
        self._busy = 0.0
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def step(self) -> None:
        start = time.perf_counter()
        loss = self.learner.backward(next(self._batches), self._count)
        norm = self.learner.gradient_norm()
        assert torch.isfinite(loss + norm)
        self.learner.update(1e-3, self._count)
        self._count += 1
        self._busy += time.perf_counter() - start

    def waited(self) -> float:
        """The share of the steps' time that was spent waiting for data."""
        return self._stopwatch.waited / self._busy

    def profile(self, steps: int = 5) -> dict[str, float]:
        """Shares of a step's time in matrix products, with what is fused with them, and in attention's kernels."""
        from torch.profiler import ProfilerActivity, profile

        with time_in_kernels() as kernels, profile(activities=[ProfilerActivity.CPU]) as profiler:
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            total = time.perf_counter() - start
        products = sum(e.self_cpu_time_total for e in profiler.key_averages() if e.key in PRODUCTS) / 1e6
        return {"products": (products + kernels["block"]) / total, "attention": kernels["attention"] / total}


@contextlib.contextmanager
def time_in_kernels() -> Iterator[dict[str, float]]:
    """Inside the `with`, the seconds spent in the kernels of fused blocks and in those of attention add up."""
    seconds = {"block": 0.0, "attention": 0.0}
    programs: Any = BoundProgram
    run = programs.run

    def watched(program: BoundProgram, name: str) -> None:
        start = time.perf_counter()
        run(program, name)
        seconds["attention" if name in ATTENTION_LAUNCHES else "block"] += time.perf_counter() - start

    programs.run = watched
    try:
        yield seconds
    finally:
        programs.run = run


class SeparateProjections(HyperAttention):
    """Three matrix products where ours has one."""

    def _project(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, queries: slice | None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        projections = (self.query_proj, self.key_proj, self.value_proj)
        q, k, v = (p(query).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for p in projections)
        return q, k, v, 0


class Plain:
    """The same model and loss, written as one would; `attention` is how its attention is written."""

    def __init__(
        self,
        config: RunConfig,
        batch: Batch | None = None,
        attention: type[HyperAttention] = SeparateProjections,
    ) -> None:
        self.config = config
        self.model = Transformer(config.model.replace(backend="reference")).train()
        for module in list(self.model.modules()):
            if isinstance(module, HyperAttention):
                module.__class__ = attention
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self._batch = config.task.sample("train", 0, config.batch_size) if batch is None else batch
        self._count = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        prediction = self.model(self._batch.x, dropout_seed=seed_of(0, "step", self._count))
        prediction = prediction[:, self.config.task.queries]
        loss = prediction_loss(self.config.task, prediction, self._batch.y)
        loss.backward()
        self.optimizer.step()
        self._count += 1


def report(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    return "\n".join(
        [
            f"Training steps, {machine()}; `headcode bench train`.",
            "",
            *markdown_table(TITLES, map(_cells, rows)),
            "",
            "Plain is the same model in eager PyTorch: reference backend, full last layer, separate projections,",
            "AdamW as it comes. FLOPs are of the pruned step (2 per multiply-add, backward = 2 × forward); the",
            "machine's GFLOP/s are those of torch's fastest large float32 product. Shares are of our step's wall time;",
            "that of matrix products includes the norms, activations, biases and sums that are fused with them.",
            "",
        ]
    )


def _cells(row: dict[str, Any]) -> Iterator[str]:
    formats = {
        "plain_ms": "{:.1f}",
        "ours_ms": "{:.1f}",
        "ratio": "{:.2f}×",
        "goal": "{:.1f}×",
        "product_share": "{:.0%}",
        "attention_share": "{:.0%}",
        "gflop": "{:.2f}",
        "gflops": "{:.0f}",
        "machine_gflops": "{:.0f}",
        "data_wait": "{:.2%}",
    }
    return (formats.get(name, "{}").format(value) for name, value in row.items())
