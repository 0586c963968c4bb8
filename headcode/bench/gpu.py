"""The Triton kernels on a GPU, in one command: are they right, how fast are they, and what could a GPU reach at best.

First every method is held to the float64 reference, output and gradients, at ragged shapes with every feature; a wrong
kernel ends the run. Then forward plus backward is timed against the reference, the compiled reference, the chunked
backend, torch's softmax attention and, where installed, flash-linear-attention; the roofline stands beside each time.
Writes gpu.csv. The kernels were written without a GPU, and this command is how to find out whether they work on one.

Example: headcode bench gpu --out bench
"""

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headcode.bench.measure import OP_METHODS, check_repeats, check_words, medians, relative_error, write_csv
from headcode.bench.ops import Shape, inputs, split
from headcode.bench.roofline import DEVICES, best_seconds, work
from headcode.ops import METHODS, hyper_attention
from headcode.ops.triton.checked import BOUNDS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = ("128,8,96,2", "128,16,36,4", "8,16,512,8", "4,16,2048,8", "4,16,2048,64")
# Ragged, and each kind of tile: narrow, in chunks, wide.
CHECKS = (Shape(3, 5, 67, 3), Shape(2, 16, 131, 8), Shape(2, 7, 61, 19), Shape(1, 16, 127, 64), Shape(1, 64, 33, 128))


class Row(NamedTuple):
    """One line of the table and of the CSV file."""

    shape: str
    method: str
    dtype: str
    contestant: str
    milliseconds: float
    roofline_milliseconds: float | None
    limited_by: str
    peak_megabytes: float | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Correctness, then speed, then the roofline beside it."""

    out: Path = Path("bench")
    """Folder for gpu.csv."""
    methods: tuple[str, ...] = ("hyla", "softmax", "linear", "softmax_hyla")
    """Which methods: see headcode.METHODS."""
    shapes: tuple[str, ...] = SHAPES
    """batch,heads,length,width of every part of the table."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Of float32, tf32, bfloat16 and float16."""
    repeats: int = 11
    """Runs of each contestant whose median counts; at least 5."""

    def run(self) -> None:
        require_gpu()
        check_repeats(self.repeats)
        check_words("methods", self.methods, OP_METHODS)
        check_words("dtypes", self.dtypes, BOUNDS)
        shapes = [Shape.parse(text) for text in self.shapes]
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print("right?")
        for line in correctness(self.methods, self.dtypes, CHECKS, "cuda"):
            print(f"  {line}", flush=True)
        print(HEADER)
        rows = []
        for dtype in self.dtypes:
            for shape in shapes:
                for method in self.methods:
                    rows += measure(shape, method, dtype, self.repeats, "cuda")
        self.out.mkdir(parents=True, exist_ok=True)
        write_csv(self.out / "gpu.csv", Row._fields, rows)


def require_gpu() -> None:
    """An error of one sentence where there is no NVIDIA GPU or no Triton."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        raise ValueError("There is no NVIDIA GPU that torch can use here; run this command on a machine that has one.")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("The GPU kernels need Triton, which is not installed: pip install 'headcode[triton]'.")


def correctness(
    methods: tuple[str, ...], dtypes: tuple[str, ...], shapes: tuple[Shape, ...], device: str
) -> Iterator[str]:
    """A line for each method and dtype with its worst errors; an error at the first wrong kernel."""
    for dtype in dtypes:
        for method in methods:
            worst = (0.0, 0.0)
            for shape in shapes:
                errors = errors_of(shape, method, dtype, device)
                if not all(error <= bound for error, bound in zip(errors, BOUNDS[dtype], strict=True)):
                    raise ValueError(
                        f"The Triton kernel is wrong for {method}, {dtype}, {shape}: relative error {errors[0]:.1e} of "
                        f"the output and {errors[1]:.1e} of a gradient, at most {BOUNDS[dtype][0]:.0e} and "
                        f"{BOUNDS[dtype][1]:.0e} are allowed; please report it, and use backend='chunked' until then."
                    )
                worst = (max(worst[0], errors[0]), max(worst[1], errors[1]))
            yield f"{method}, {dtype}: errors {worst[0]:.0e} and {worst[1]:.0e} at {len(shapes)} shapes"


def errors_of(shape: Shape, method: str, dtype: str, device: str) -> tuple[float, float]:
    """Relative RMS errors of output and worst gradient, with band, padding, causality and dropout at once."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        kind = DTYPES.get(dtype, torch.float32)
        return torch.randn(*size, generator=generator).to(device, kind)

    batch, heads, length, width = shape
    keys = length + 5
    tensors = [normal(batch, heads, size, width) for size in (length, keys, keys)] + [normal(heads, length + keys - 1)]
    grad = normal(batch, heads, length, width)
    mask = (torch.rand(batch, 1, 1, keys, generator=generator) > 0.1).to(device)
    results = []
    for backend, convert in (("triton", lambda t: t), ("reference", Tensor.double)):
        leaves = [convert(t).detach().requires_grad_() for t in tensors]
        with precision(dtype):
            out = hyper_attention(
                *leaves[:3],
                mask=mask,
                relative_bias=leaves[3],
                causal=True,
                norm=METHODS[method].norm,
                value_net=METHODS[method].value_net,
                dropout=0.1,
                dropout_seed=7,
                backend=backend,
            )
            results.append([out.detach(), *torch.autograd.grad(out, leaves, convert(grad))])
    errors = [relative_error(*pair) for pair in zip(*results, strict=True)]
    return errors[0], max(errors[1:])


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Inside the `with`, float32 products in TF32 where asked for, in full otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def contestants(shape: Shape, method: str, dtype: str, device: str) -> dict[str, Callable[[], Any]]:
    """One forward and backward pass of each, by name."""
    projection, grad = inputs(shape)
    kind = DTYPES.get(dtype, torch.float32)
    projection = projection.detach().to(device, kind).requires_grad_()
    grad = grad.to(device, kind)
    norm, value_net, _ = METHODS[method]

    def through(function: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            function(*split(projection, shape)).backward(grad)
            projection.grad = None

        return run

    def op(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: hyper_attention(q, k, v, norm=norm, value_net=value_net, backend=backend)

    runs = {"triton": through(op("triton")), "chunked": through(op("chunked"))}
    if 6 * shape.batch * shape.length**2 * shape.heads * 4 < 8 * 2**30:
        runs["reference"] = through(op("reference"))
        runs["compiled reference"] = through(torch.compile(op("reference")))
    runs["torch softmax"] = through(F.scaled_dot_product_attention)
    if importlib.util.find_spec("fla") is not None:
        chunk_linear_attn = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn

        def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = chunk_linear_attn(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), normalize=False)[0]
            return out.transpose(1, 2)

        runs["fla linear"] = through(linear)
    return runs


def measure(shape: Shape, method: str, dtype: str, repeats: int, device: str) -> list[Row]:
    """Medians of interleaved runs, printed as they come."""
    rows = []
    gpu = next((DEVICES[name] for name in DEVICES if device == "cuda" and name in torch.cuda.get_device_name()), None)
    with precision(dtype):
        runs = contestants(shape, method, dtype, device)
        # The first three rounds compile and tune kernels.
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        for name, seconds in medians(runs, repeats, warmup=3, wait=wait).items():
            best, limit = (None, "")
            if gpu is not None and name == "triton":
                best, limit = best_seconds(work(method, *shape, dtype=dtype), gpu, dtype, shape.width)
            megabytes = peak_megabytes(runs[name]) if device == "cuda" else None
            milliseconds = None if best is None else 1e3 * best
            row = Row(str(shape), method, dtype, name, 1e3 * seconds, milliseconds, limit, megabytes)
            print(line(row), flush=True)
            rows.append(row)
    return rows


def peak_megabytes(run: Callable[[], Any]) -> float:
    """What one pass allocates beyond what was there before it, at its highest."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


COLUMNS = {"shape": -20, "method": -14, "dtype": -10, "contestant": -20}
COLUMNS |= {"ms": 10, "roofline ms": 13, "share": 8, "peak MB": 10}
HEADER = "".join(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in COLUMNS.items())


def line(row: Row) -> str:
    best = row.roofline_milliseconds
    roofline = "" if best is None else f"{best:.3f}"
    share = "" if best is None else f"{best / row.milliseconds:.0%}"
    peak = "" if row.peak_megabytes is None else f"{row.peak_megabytes:.0f}"
    return (
        f"{row.shape:<20}{row.method:<14}{row.dtype:<10}{row.contestant:<20}{row.milliseconds:>10.3f}"
        f"{roofline:>13}{share:>8}{peak:>10}"
    )
