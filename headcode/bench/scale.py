"""How large a layer's output is at initialisation, by length and pooling, and what that does to a small GPT.

The first table has the standard deviation of the outputs of one HyperAttention on normal tokens. The second trains a
small GPT over bytes, written in plain PyTorch, on the sources of Python's standard library: its loss before the first
step, without and with a norm before the logits, and on held-out text after the last one.

Example: headcode bench scale --steps 200
"""

import dataclasses
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.bench.measure import aligned_table, torch_threads, write_csv
from headcode.nn import HyperAttention

LENGTHS = (8, 64, 512, 4096)
VARIANTS = (("softmax", "sum"), ("hyla", "sum"), ("hyla", "mean"), ("hyla", "sqrt"))
"""Methods with their poolings."""
TEXT_BYTES, HELD_OUT = 2**21, 2**17


@dataclasses.dataclass(frozen=True)
class Scale:
    """Standard deviations of outputs at initialisation, and losses of a small GPT, for every pooling."""

    out: Path = Path("bench")
    """Folder for scale.csv."""
    lengths: tuple[int, ...] = LENGTHS
    """Tokens that the layer of the first table sees."""
    steps: int = 200
    """Training steps of each GPT; 0 leaves its table with the losses before the first one."""
    seeds: int = 3
    """Trainings of each GPT."""
    rate: float = 1e-3
    """Learning rate."""
    dim: int = 64
    """Width of the GPT, which has 8 heads."""
    layers: int = 3
    """Layers of the GPT."""
    context: int = 64
    """Its tokens."""
    batch_size: int = 16
    """Sequences in a step."""
    threads: int = 1
    """torch.set_num_threads; 0 leaves torch's choice."""

    def run(self) -> None:
        if min(self.seeds, self.layers, self.context, self.batch_size, *self.lengths) < 1 or self.steps < 0:
            raise ValueError("--seeds, --layers, --context, --batch-size and --lengths must be at least 1, --steps 0.")
        if self.dim < 8 or self.dim % 8:
            raise ValueError(f"--dim must be a multiple of 8, got {self.dim}.")
        self.out.mkdir(parents=True, exist_ok=True)
        with torch_threads(self.threads):
            rows = [[*variant, *deviations(*variant, self.lengths)] for variant in VARIANTS]
            titles = ["method", "pooling", *(f"{length:,} tokens" for length in self.lengths)]
            _print_table(titles, rows)
            losses = []
            for variant in VARIANTS:
                losses.append([*variant, *self._losses(*variant)])
                print("  ".join(losses[-1]), flush=True)
            _print_table(["method", "pooling", *LOSSES], losses)
        write_csv(self.out / "scale.csv", [*titles, *LOSSES], [a + b[2:] for a, b in zip(rows, losses, strict=True)])

    def _losses(self, method: str, pooling: str) -> list[str]:
        """The mean over seeds of each of LOSSES, and its standard deviation."""
        runs = [self._train(method, pooling, seed) for seed in range(self.seeds)]
        return [_with_deviation(list(values)) for values in zip(*runs, strict=True)]

    def _train(self, method: str, pooling: str, seed: int) -> tuple[float, float, float]:
        text = standard_library()
        training, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
        torch.manual_seed(seed)
        model = SmallGpt(method, pooling, self.dim, self.layers, self.context)
        with_norm = model.loss(held_out, self.context)
        final_norm, model.final_norm = model.final_norm, nn.Identity()
        without_norm = model.loss(held_out, self.context)
        model.final_norm = final_norm
        optimiser = torch.optim.AdamW(model.parameters(), self.rate)
        for step, tokens in enumerate(_batches(training, self.batch_size, self.context, self.steps, seed)):
            for group in optimiser.param_groups:
                group["lr"] = self.rate * min(1.0, (step + 1) / 50)
            optimiser.zero_grad()
            model.next_token_loss(tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
        return without_norm, with_norm, model.loss(held_out, self.context)


LOSSES = ("start, no last norm", "start", "held out, at the end")


class SmallGpt(nn.Module):
    """Bytes in, logits of the next byte out: pre-norm blocks with learned positions, and a norm before the logits."""

    def __init__(self, method: str, pooling: str, dim: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.attention_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.attentions = nn.ModuleList(
            HyperAttention(dim, 8, method=method, pooling=pooling, causal=True) for _ in range(layers)
        )
        self.feedforwards = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
        self.final_norm: nn.Module = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for norm, attention, feedforward in zip(self.attention_norms, self.attentions, self.feedforwards, strict=True):
            x = x + attention(norm(x))
            x = x + feedforward(x)
        return self.head(self.final_norm(x))

    def next_token_loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def loss(self, text: Tensor, context: int) -> float:
        """Of the first windows of a text, each by itself."""
        count = min(64, len(text) // (context + 1))
        windows = text[: count * (context + 1)].view(count, context + 1)
        return statistics.fmean(self.next_token_loss(part).item() for part in windows.split(8))


def deviations(method: str, pooling: str, lengths: tuple[int, ...], dim: int = 256, heads: int = 8) -> list[str]:
    """Standard deviations of a new layer's outputs at each length, from at least 4,096 tokens."""
    torch.manual_seed(0)
    layer = HyperAttention(dim, heads, method=method, pooling=pooling)
    with torch.no_grad():
        return [f"{layer(torch.randn(max(1, 4096 // n), n, dim)).std().item():.2f}" for n in lengths]


def standard_library() -> Tensor:
    """The bytes of TEXT_BYTES of the sources of Python's standard library, in the order of their names."""
    folder, text = Path(sysconfig.get_path("stdlib")), b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8).long()


def _batches(text: Tensor, batch_size: int, context: int, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - context - 1, (batch_size,), generator=generator)
        yield text[starts[:, None] + torch.arange(context + 1)]


def _with_deviation(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def _print_table(titles: list[str], rows: list[list[str]]) -> None:
    print("\n".join(aligned_table(titles, rows, words=2)) + "\n", flush=True)
