"""The training loop.

    trainer = Trainer(preset("logic-small"), "runs/first")
    trainer.run()                           # again on the same folder: goes on from the last checkpoint, bit for bit

Everything that a step needs is a function of (configuration, step): batches by instance number, dropout by a hash of
(seed, step), the learning rate. What is left, the weights and the optimiser's moments, is in the checkpoint.
"""

import contextlib
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcode.nn import Transformer
from headcode.run import RunConfig
from headcode.tasks import Batch
from headcode.train.checkpoint import (
    CHECKPOINTS,
    Checkpoint,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_checkpoint,
    refuse_changed_config,
    set_aside,
    write_checkpoint,
)
from headcode.train.data import Prefetcher
from headcode.train.distributed import AsyncScalar, Group, join_group, leave_group
from headcode.train.evaluate import evaluate, evaluation_splits
from headcode.train.folder import RunFolder, read_environments
from headcode.train.interruption import Interruption
from headcode.train.learner import Learner
from headcode.train.loss import Loss, task_loss
from headcode.train.optim import learning_rate
from headcode.train.progress import Reporter
from headcode.train.randomness import random_state, seed_of, set_random_state
from headcode.train.runtime import (
    Runtime,
    RunWarning,
    TrainingFailed,
    changes_of_environment,
    describe_environment,
    keep_freed_memory,
    numerics,
)
from headcode.train.stopwatch import Stopwatch

SIGNAL_DELAY = 8
"""Steps until processes with GPUs act on a signal that one of them got, so that no host ever waits for its GPU."""


class TrainingInterrupted(KeyboardInterrupt):
    """A signal stopped the run after a complete step, which is saved if there is a run folder."""

    def __init__(self, signal_number: int, step: int, folder: Path | None) -> None:
        self.signal_number, self.step, self.folder = signal_number, step, folder
        saved = "." if folder is None else f" and saved; go on with: headcode resume {folder}"
        super().__init__(f"Training was stopped at step {step}{saved}")


class RunResult(NamedTuple):
    """What is left after the last step."""

    step: int
    metrics: list[dict[str, Any]]
    """The records of metrics.jsonl."""
    model: Transformer
    """In evaluation mode, with the averaged weights if the run keeps them."""


class Trainer:
    """Trains one run, on one device or as one process of many.

    Args:
        config: what to train; see `headcode.run`.
        out: the run folder; None trains in memory and writes nothing.
        loss: a function of `LossContext`; see `headcode.train.loss` for one on codes.
        runtime: device, threads, compilation, sharding.
        reporters: told of every step and record, in the main process.

    `model` may be given other weights before `run`; a checkpoint in the folder comes first.
    """

    def __init__(
        self,
        config: RunConfig,
        out: str | Path | None = None,
        *,
        loss: Loss = task_loss,
        runtime: Runtime | None = None,
        reporters: Sequence[Reporter] = (),
    ) -> None:
        self.config, self.task = config, config.task
        self.out = None if out is None else Path(out)
        self.runtime = Runtime() if runtime is None else runtime
        self.learner = Learner(config, self.runtime, loss)
        self.step = 0
        self.records: list[dict[str, Any]] = []
        """What metrics.jsonl holds."""
        self.best: dict[str, Any] | None = None
        """Step, split and loss of the best evaluation so far."""
        self._reporters = list(reporters)
        self._folder: RunFolder | None = None
        self._group = Group()
        # Since the last record: numbers, or tensors whose value the host has not read yet.
        self._losses: list[Any] = []
        self._norms: list[Any] = []

    @property
    def model(self) -> Transformer:
        return self.learner.model

    def run(self) -> RunResult:
        """Train to the last step, from the last checkpoint if the folder has one."""
        config = self.config
        with contextlib.ExitStack() as stack:
            self._set_up(stack)
            interruption = stack.enter_context(Interruption())
            batches = stack.enter_context(Prefetcher(self._draw, self.step, config.steps))
            for parts in self._stopwatch.waiting(batches):
                rate = learning_rate(config.optimization, self.step, config.steps)
                loss = self.learner.backward(parts, self.step)
                loss, stop = self._agree(loss, interruption.signal_number)
                self._update(rate, loss, self.learner.gradient_norm())
                self.step += 1
                for reporter in self._reporters:
                    reporter.advance(self.step)
                if self._is_due(config.log_every):
                    self._log(rate)
                is_best = self._is_due(config.eval_every) and self._evaluate()
                if is_best or stop or self._is_due(config.checkpoint_every):
                    self._save()
                if stop and self.step < config.steps:
                    raise TrainingInterrupted(stop, self.step, self.out)
            self.learner.use_average()
        return RunResult(self.step, self.records, self.model.eval())

    def probe(self, seconds: float) -> float:
        """Steps per second, measured by training for a while; nothing is written and the weights stay as they are."""
        self.out = None
        with contextlib.ExitStack() as stack:
            self._set_up(stack)
            batches = iter(stack.enter_context(Prefetcher(self._draw, 0, 2**62)))
            for _ in range(2):  # the first steps compile kernels and fill caches
                self._update(0.0, self.learner.backward(next(batches), 0), self.learner.gradient_norm())
            count, start = 0, time.perf_counter()
            while count == 0 or time.perf_counter() - start < seconds:
                self._update(0.0, self.learner.backward(next(batches), count), self.learner.gradient_norm())
                count += 1
            self._settle(count)
            return count / (time.perf_counter() - start)

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        """Join the group, open the folder, make the model ready and load the last checkpoint."""
        device = self.learner.device
        keep_freed_memory()
        stack.enter_context(numerics(self.config.precision, device, self.runtime.threads))
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        torch.manual_seed(seed_of(self.config.seed, "run"))
        self._group = join_group(device)
        stack.callback(leave_group)
        self._part_size()
        if self.out is not None:
            self._folder = self._open_folder(self.out)
        if self._folder is not None:
            stack.callback(self._folder.close)
        self.learner.join(self._group)
        # To read the loss costs nothing on a CPU, but would stall a GPU: there the optimiser itself skips every update
        # from the first bad one on, and the host reads the losses when it logs.
        self._looks_each_step = device.type == "cpu" or not self.learner.optimizer.skips_on_device
        self._failed = torch.zeros((), device=device)
        self._signal_delay = 0 if self._looks_each_step else SIGNAL_DELAY
        self._signals: deque[AsyncScalar] = deque()
        self._restore()
        if self._folder is not None:
            self._record_start(self._folder)
        self._stopwatch = Stopwatch(self.step)
        if not self._group.is_main:
            self._reporters = []
        for reporter in self._reporters:
            reporter.start(self.step, self.config.steps)
            stack.callback(reporter.close)

    def _open_folder(self, out: Path) -> RunFolder | None:
        """The main process opens the folder. If it cannot, it says why, and the others end without a word."""
        folder = refusal = None
        if self._group.is_main:
            try:
                folder = RunFolder.create(out, self.config)
            except (ValueError, OSError) as error:
                refusal = error
        is_refused = self._group.from_main(refusal is not None)
        if refusal is not None:
            raise refusal
        if is_refused:
            raise SystemExit(2)
        return folder

    def _record_start(self, folder: RunFolder) -> None:
        world_size = self._group.world_size
        environment = describe_environment(self.runtime, self.learner.device, self.config.precision, world_size)
        if changes := changes_of_environment(read_environments(folder.path), environment):
            words = f"The run goes on under other conditions, so its last bits may differ: {changes}."
            warnings.warn(RunWarning(words), stacklevel=4)
        folder.record_environment(environment, self.step)
        folder.rewind_metrics(self.records)

    def _part_size(self) -> int:
        """Sequences of one forward pass of one process."""
        pieces = self.config.accumulate * self._group.world_size
        if self.config.batch_size % pieces:
            raise ValueError(
                f"batch_size {self.config.batch_size} cannot be divided among {self._group.world_size} processes with "
                f"{self.config.accumulate} parts each; choose a multiple of {pieces}."
            )
        return self.config.batch_size // pieces

    def _draw(self, step: int) -> list[Batch]:
        """This process's share of a step's instances, part by part: one stream for any number of processes."""
        first, size = step * self.config.accumulate, self._part_size()
        rank, world_size = self._group.rank, self._group.world_size
        numbers = [(first + part) * world_size + rank for part in range(self.config.accumulate)]
        batches = [self.task.sample("train", number, size) for number in numbers]
        if self.learner.device.type != "cuda":
            return batches
        return [Batch(batch.x.pin_memory(), batch.y.pin_memory(), batch.info) for batch in batches]

    def _agree(self, loss: Tensor, signal_number: int | None) -> tuple[Tensor, int]:
        """The loss of the whole batch, and a signal that any process got (0: none): the same on all processes."""
        if self._group.world_size == 1:
            return loss, signal_number or 0
        loss, signals = self._group.mean(torch.stack([loss, torch.full_like(loss, signal_number or 0)]))
        self._signals.append(AsyncScalar(signals))
        if len(self._signals) <= self._signal_delay or self._signals.popleft().item() == 0:
            return loss, 0
        return loss, self._group.largest(signal_number or 0)

    def _update(self, learning_rate: float, loss: Tensor, norm: Tensor) -> None:
        """One step of the optimiser, unless the loss or the gradient is not finite."""
        self._losses.append(loss)
        self._norms.append(norm)
        if self._looks_each_step:
            self._settle(self.step)
            self.learner.update(learning_rate, self.step)
        else:
            self._failed = torch.maximum(self._failed, (~torch.isfinite(loss + norm)).float())
            self.learner.update(learning_rate, self.step, skip=self._failed)

    def _settle(self, last_step: int) -> None:
        """Turn losses and norms that are still tensors into numbers; an error if one is not finite.

        The last of them belong to `last_step`.
        """
        for name, values in (("loss", self._losses), ("gradient norm", self._norms)):
            first = next((i for i, value in enumerate(values) if isinstance(value, Tensor)), len(values))
            values[first:] = [float(value) for value in values[first:]]
            for index in range(first, len(values)):
                if not math.isfinite(values[index]):
                    raise TrainingFailed(
                        f"The {name} is {values[index]} at step {last_step - (len(values) - 1 - index)}: training "
                        f"stopped before the update{self._last_saved()}; try a lower learning_rate, or clip_norm."
                    )

    def _is_due(self, every: int) -> bool:
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def _log(self, learning_rate: float) -> None:
        self._settle(self.step - 1)
        means = {"loss": fmean(self._losses), "learning_rate": learning_rate, "gradient_norm": fmean(self._norms)}
        self._add_record({"kind": "train", "step": self.step, **means})
        self._losses, self._norms = [], []
        if self._folder is not None:
            with self._disk_problems_explained():
                self._folder.add_timing({"step": self.step, **self._stopwatch.read(self.step)})

    def _evaluate(self) -> bool:
        """Metrics on every evaluation stream; whether this is the best evaluation so far."""
        size, batch_size = self.config.eval_size, self.config.eval_batch_size
        splits = evaluation_splits(self.task)
        if size == 0 or not splits:
            return False
        self._settle(self.step - 1)
        with self._stopwatch.paused(), self.learner.evaluating() as predict:
            found = {split: evaluate(predict, self.task, split, size, batch_size, self._group) for split in splits}
        for split, metrics in found.items():
            self._add_record({"kind": "eval", "step": self.step, "split": split, **metrics})
        # Chosen on fresh samples of the training compositions: held-out ones must not choose a checkpoint.
        judge = "iid" if "iid" in found else splits[0]
        loss = found[judge]["loss"]
        if loss is None or (self.best is not None and loss >= self.best["loss"]):
            return False
        self.best = {"step": self.step, "split": judge, "loss": loss}
        return True

    def _add_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._folder is not None:
            with self._disk_problems_explained():
                self._folder.add_metrics(record)
        for reporter in self._reporters:
            reporter.record(record)

    def _save(self) -> None:
        """A checkpoint of this step. Every process takes part, the main one writes."""
        if self.out is None:
            return
        self._settle(self.step - 1)
        with self._stopwatch.paused():
            tensors = self.learner.tensors()
            state = {
                "step": self.step,
                "config": self.config.to_dict(),
                "generator_version": self.task.version,
                "best": self.best,
                "losses": self._losses,
                "gradient_norms": self._norms,
                "random": random_state(self.learner.device),
                "metrics": self.records,
            }
            if self._folder is not None:
                with self._disk_problems_explained():
                    self._folder.sync_metrics()
                    write_checkpoint(self._folder.path / CHECKPOINTS, self.config.model, tensors, state)
                    self._prune(self._folder)

    def _prune(self, folder: RunFolder) -> None:
        prune(folder.path, None if self.best is None else self.best["step"])

    def _restore(self) -> None:
        """Load the newest undamaged checkpoint, or stay at step 0."""
        newest: Checkpoint | None = None
        chosen: str | None = None
        if self._folder is not None:
            newest, damaged = newest_checkpoint(self._folder.path)
            for complaint in damaged:
                warnings.warn(RunWarning(f"A damaged checkpoint was set aside: {complaint}"), stacklevel=4)
                set_aside(complaint.folder)
            chosen = None if newest is None else newest.folder.name
        chosen = self._group.from_main(chosen)
        if chosen is None or self.out is None:
            return
        checkpoint = newest or read_checkpoint(self.out / CHECKPOINTS / chosen)
        state = checkpoint.state
        refuse_changed_config(checkpoint, self.out, self.config.to_dict())
        if "generator_version" not in state:
            raise ValueError(
                f"{self.out} has weights alone, as the zoo's models have, and not the state of their training: "
                "it can be evaluated, and not resumed."
            )
        if state["generator_version"] != self.task.version:
            raise ValueError(
                f"{self.out} was trained on version {state['generator_version']} of the task's generator, this is "
                f"version {self.task.version} and its data differ; go on with the headcode that started it."
            )
        self.learner.load({name: checkpoint.tensors(name) for name in state["files"] if name.endswith(".safetensors")})
        self.step, self.best, self.records = state["step"], state["best"], state["metrics"]
        self._losses, self._norms = state["losses"], state["gradient_norms"]
        set_random_state(state["random"], self.learner.device)
        if self._folder is not None:
            self._prune(self._folder)  # a kill right after the last checkpoint may have left old ones

    def _last_saved(self) -> str:
        """Words on the last checkpoint of this run."""
        if self.out is None:
            return ""
        saved = list_checkpoints(self.out)
        return f" (the last good checkpoint is {saved[0]})" if saved else " (no checkpoint was written yet)"

    @contextlib.contextmanager
    def _disk_problems_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingFailed(
                f"{self.out} could not be written at step {self.step} ({error.strerror or error}){self._last_saved()}; "
                f"make room or give access, then: headcode resume {self.out}"
            ) from None
