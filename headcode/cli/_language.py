"""`headcode train lm`: which text, and what the run will cost."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from headcode.cli.train import TrainOptions
from headcode.nn import Transformer
from headcode.presets import preset
from headcode.run import RunConfig, with_task
from headcode.tasks.language.corpus import PYTHON, Source, StreamedDataset, TextFiles, find_dataset
from headcode.tasks.language.prepare import prepare
from headcode.tasks.language.tokenizer import read_tokenizer
from headcode.train import Runtime
from headcode.train.cost import product_speed, step_flops
from headcode.train.distributed import is_main_process
from headcode.train.progress import duration

PRESET_DATASETS = {"lm-paper": "c4", "wikitext-authors": "wikitext"}
"""The text of a preset that was made for one; the others take Python's own sources."""
PRESET_EPOCHS = {"wikitext-authors": 5.0}
WITHOUT_TEXT = "(default: the preset's, or python)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageOptions(TrainOptions):
    """The flags of a language model's training beyond those of every training."""

    text: Path | None = None
    """A text file, or a folder of text files."""
    files: str = "*"
    """With a folder: names of the files to read, for example '*.md'."""
    dataset: Annotated[str | None, tyro.conf.arg(help_behavior_hint=WITHOUT_TEXT)] = None
    """python (the standard library's sources), c4, wikitext, a dataset of the Hugging Face hub (NAME or NAME:CONFIG),
    or a folder with one."""
    column: str = "text"
    """With a dataset: the column that holds the text."""
    tokenizer_file: Path | None = None
    """An existing tokenizer.json, or a folder that has one, in place of one trained on the text."""
    max_tokens: int | None = None
    """Stop reading the text after so many training tokens; of a streamed dataset, as many as the run reads."""
    epochs: float | None = None
    """Train for so many passes over the text, in place of --steps."""

    def cost(self, config: RunConfig, runtime: Runtime) -> dict[str, Any]:
        """Without a probe: a dry run fetches and prepares no text."""
        return cost(config)

    def ready(self, config: RunConfig) -> RunConfig:
        if self.text is not None and self.dataset is not None:
            raise ValueError("Give --text or --dataset, not both.")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise ValueError(f"--epochs must be above 0, got {self.epochs}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"--max-tokens must be 1 or more, got {self.max_tokens}.")
        if config.batch_size * config.steps > 2**62:
            raise ValueError(f"steps {config.steps} are more than can be counted.")
        task: Any = config.task
        tokenizer = None if self.tokenizer_file is None else read_tokenizer(self.tokenizer_file)
        if task.tokenizer == "file" and tokenizer is None:
            raise ValueError("--tokenizer file needs --tokenizer-file, a tokenizer.json that exists.")
        self._say(cost_line(config))
        source = self.source()
        words = source.words()
        self._say(f"reading {words.get('text') or 'the dataset ' + words['dataset']}")
        shards = prepare(
            source,
            tokenizer=task.tokenizer if tokenizer is None else tokenizer,
            vocab_size=task.vocab_size,
            validation=task.validation,
            max_tokens=self._limit(config),
            say=self._say,
        )
        task = task.with_text(shards)
        counts = [f"{shards.count(split):,} tokens of {split}" for split in shards.splits]
        self._say(f"text {shards.fingerprint[:12]}: {', '.join(counts)}, {task.vocab_size:,} different ones")
        if task.validation and "validation" not in shards.splits:
            self._say("no document fell to the validation side, so nothing is held out; more documents would help")
        config = with_task(config, task)
        epochs = self.epochs or (PRESET_EPOCHS.get(self.preset) if config.steps == preset(self.preset).steps else None)
        if epochs is not None:
            config = config.replace(steps=max(round(epochs * task.epoch_size / config.batch_size), 1))
        return config

    def source(self) -> Source:
        if self.text is not None:
            source = TextFiles(self.text, self.files)
            if source.skipped:
                self._say(f"{len(source.skipped)} files of {self.text} are not text and are passed over")
            return source
        name = PRESET_DATASETS.get(self.preset, PYTHON) if self.dataset is None else self.dataset
        return find_dataset(name, self.column)

    def _limit(self, config: RunConfig) -> int | None:
        if self.max_tokens is not None or self.text is not None:
            return self.max_tokens
        source = self.source()
        if not isinstance(source, StreamedDataset) or source.whole or self.epochs is not None:
            return None
        return config.steps * config.batch_size * config.task.sequence_length + 1

    def _say(self, line: str) -> None:
        if is_main_process():
            print(line, file=sys.stderr, flush=True)


def cost(config: RunConfig) -> dict[str, Any]:
    """Parameters, tokens and arithmetic of a run; the time is what the products alone take at this machine's speed."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(config.model).parameters())
    flops = step_flops(config)
    speed = product_speed(size=512, seconds=0.2)
    seconds = config.steps * flops / speed
    return {
        "parameters": parameters,
        "tokens": config.steps * config.batch_size * config.task.sequence_length,
        "flops_per_step": flops,
        "total_flops": config.steps * flops,
        "cpu_flops_per_second": round(speed),
        "least_seconds_on_this_cpu": round(seconds, 1),
        "least_time_on_this_cpu": duration(seconds),
    }


def cost_line(config: RunConfig) -> str:
    """The cost in one line, said before anything is fetched or trained."""
    facts = cost(config)
    return (
        f"{config.model.method}: {facts['parameters']:,} parameters, {facts['tokens']:,} tokens in {config.steps:,} "
        f"steps, {facts['total_flops']:.3g} FLOPs: at least {facts['least_time_on_this_cpu']} on this CPU"
    )
