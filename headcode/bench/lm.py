"""Tokens per second of language models, in training and in decoding, against a Hugging Face Llama of the same size.

All in one run, in turns. Training is a whole step (forward, backward, AdamW) on random tokens; decoding is one
sequence, token by token with a cache, greedy. Ours is timed by `headcode.nn.generate` and once more through Hugging
Face's own `generate()`, which the Llama uses.

Example: headcode bench lm --rounds 5 --out docs/bench-lm.md
"""

import dataclasses
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from headcode.bench.measure import check_words, machine, markdown_table, timed, torch_threads
from headcode.files import replace_file
from headcode.nn import ModelConfig, Transformer, generate
from headcode.presets import preset
from headcode.run import RunConfig, override
from headcode.tasks import Batch
from headcode.train.distributed import Group
from headcode.train.learner import Learner
from headcode.train.runtime import Runtime, keep_freed_memory

LLAMA = "Llama (Hugging Face)"
TITLES = {
    "model": "model",
    "parameters": "parameters",
    "train": "training tokens/s",
    "train_ratio": "against Llama",
    "decode": "decoding tokens/s",
    "decode_ratio": "against Llama",
    "decode_hf": "decoding by HF generate()",
}


@dataclasses.dataclass(frozen=True)
class Lm:
    """Our methods and a Llama with the same width, layers, heads, feed-forward and vocabulary (embeddings tied)."""

    methods: tuple[str, ...] = ("softmax", "linear", "hyla")
    """Any of the methods."""
    dim: int = 128
    num_layers: int = 3
    num_heads: int = 8
    mlp_dim: int = 256
    vocab_size: int = 2048
    context: int = 128
    """Tokens of a training sequence."""
    batch_size: int = 16
    """Sequences of a training step."""
    prompt: int = 16
    """Tokens that decoding starts with."""
    new_tokens: int = 112
    """Tokens that are decoded."""
    rounds: int = 5
    """Turns; the median counts."""
    seconds: float = 2.0
    """Training time of one turn, at least two steps; a quarter of it for each way of decoding, at least once."""
    threads: int | None = None
    """CPU threads; torch's choice unless given."""
    out: Path | None = None
    """Also write the table to this Markdown file."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        sizes = (self.context, self.batch_size, self.prompt, self.new_tokens, self.rounds)
        if min(sizes) < 1 or not self.seconds > 0 or (self.threads is not None and self.threads < 1):
            raise ValueError("Every size, --rounds and --threads must be 1 or more, and --seconds above 0.")
        check_words("methods", self.methods)
        if self.out is not None:  # before minutes are spent on what could not be written
            self.out.parent.mkdir(parents=True, exist_ok=True)
        keep_freed_memory()  # for both sides, although only ours would have it
        with torch_threads(self.threads):
            rows = self.measure()
            print(json.dumps({"machine": machine(), "rows": rows}) if self.json else report(rows, self))
            if self.out is not None:
                replace_file(self.out, report(rows, self).encode())

    def config(self, method: str) -> RunConfig:
        sizes = {name: getattr(self, name) for name in ("dim", "num_layers", "num_heads", "mlp_dim", "vocab_size")}
        widths = {"qk_dim": self.dim, "v_dim": self.dim}
        return override(
            preset("lm-small"), method=method, context=self.context, batch_size=self.batch_size, **sizes, **widths
        )

    def measure(self) -> list[dict[str, Any]]:
        sides: list[Any] = [Llama(self), *(Ours(self, method) for method in self.methods)]
        for side in sides:  # kernels are compiled and caches filled
            side.step()
            side.decode(2)
            side.decode_hf(2)
        taken: dict[str, dict[str, list[float]]] = {side.name: {"train": [], "decode": [], "hf": []} for side in sides}
        for _ in range(self.rounds):
            for side in sides:
                speeds = taken[side.name]
                step = statistics.median(timed(side.step, self.seconds, fewest=2))
                speeds["train"].append(self.batch_size * self.context / step)
                for kind, decode in (("decode", side.decode), ("hf", side.decode_hf)):
                    turn = timed(functools.partial(decode, self.new_tokens), self.seconds / 4, fewest=1)
                    speeds[kind].append(self.new_tokens / statistics.median(turn))
        middle = {
            name: {kind: statistics.median(each) for kind, each in speeds.items()} for name, speeds in taken.items()
        }
        return [
            {
                "model": side.name,
                "parameters": side.parameters,
                "train": middle[side.name]["train"],
                "train_ratio": middle[side.name]["train"] / middle[LLAMA]["train"],
                "decode": middle[side.name]["decode"],
                "decode_ratio": middle[side.name]["decode"] / middle[LLAMA]["decode"],
                "decode_hf": middle[side.name]["hf"],
            }
            for side in sides
        ]


class Ours:
    """The training step of `headcode train lm`, and `headcode.nn.generate`."""

    def __init__(self, bench: Lm, method: str) -> None:
        self.name = method
        config = bench.config(method)
        self.learner = Learner(config, Runtime(device="cpu"))
        self.learner.join(Group())
        self.model: Transformer = self.learner.model
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        x, y, self._prompt = random_tokens(bench, config.model)
        self._parts = [Batch(x, y, {})]
        self._count = 0
        self._hf: Any = None

    def step(self) -> None:
        loss = self.learner.backward(self._parts, self._count)
        assert torch.isfinite(loss + self.learner.gradient_norm())
        self.learner.update(1e-5, self._count)
        self._count += 1

    def decode(self, count: int) -> None:
        assert len(list(generate(self.model, self._prompt[0].tolist(), count, temperature=0))) == count

    def decode_hf(self, count: int) -> None:
        from headcode.interop import HeadcodeForCausalLM

        if self._hf is None:
            self._hf = HeadcodeForCausalLM.from_transformer(self.model).eval()
        decode_by_generate(self._hf, self._prompt, count)


class Llama:
    """Hugging Face's Llama of the same sizes, with torch's AdamW as it comes."""

    def __init__(self, bench: Lm) -> None:
        transformers = _transformers()
        self.name = LLAMA
        settings = transformers.LlamaConfig(
            vocab_size=bench.vocab_size,
            hidden_size=bench.dim,
            intermediate_size=bench.mlp_dim,
            num_hidden_layers=bench.num_layers,
            num_attention_heads=bench.num_heads,
            num_key_value_heads=bench.num_heads,
            max_position_embeddings=max(bench.context, bench.prompt + bench.new_tokens),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.model = transformers.LlamaForCausalLM(settings)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, weight_decay=0.1)
        self._x, self._y, self._prompt = random_tokens(bench, bench.config("softmax").model)

    def step(self) -> None:
        self.model.train()
        self._optimizer.zero_grad()
        logits = self.model(self._x, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), self._y.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        assert torch.isfinite(loss.detach() + norm)
        self._optimizer.step()

    def decode(self, count: int) -> None:
        decode_by_generate(self.model.eval(), self._prompt, count)

    decode_hf = decode


def decode_by_generate(model: Any, prompt: torch.Tensor, count: int) -> None:
    with torch.no_grad():
        mask = torch.ones_like(prompt)
        found = model.generate(
            prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    assert found.shape[1] == prompt.shape[1] + count


def random_tokens(bench: Lm, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, and a prompt."""
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (bench.batch_size, bench.context + 1), generator=generator)
    prompt = torch.randint(0, config.vocab_size, (1, bench.prompt), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), prompt


def report(rows: list[dict[str, Any]], bench: Lm) -> str:
    """The table in Markdown."""
    formats = {
        "model": "{}",
        "parameters": "{:,}",
        "train": "{:,.0f}",
        "train_ratio": "{:.2f}×",
        "decode": "{:,.0f}",
        "decode_ratio": "{:.2f}×",
        "decode_hf": "{:,.0f}",
    }
    return "\n".join(
        [
            f"Language models, {machine()}; `headcode bench lm`. Width {bench.dim}, {bench.num_layers} layers, "
            f"{bench.num_heads} heads, {bench.vocab_size:,} tokens; training on {bench.batch_size} × {bench.context} "
            f"tokens a step, decoding {bench.new_tokens} after {bench.prompt}; medians of {bench.rounds} turns.",
            "",
            *markdown_table(TITLES.values(), ([formats[name].format(row[name]) for name in TITLES] for row in rows)),
            "",
            "The Llama decodes by Hugging Face's `generate()`; ours by `headcode.nn.generate` and, in the last column,",
            "by the same `generate()`. `linear` decodes with a state of constant size.",
            "",
        ]
    )


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModuleNotFoundError("The comparison needs transformers: pip install 'headcode[hf]'.") from None
    return transformers
