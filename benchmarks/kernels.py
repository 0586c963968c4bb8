"""Compile the Triton kernels for NVIDIA GPUs, on a machine that needs none: registers, spills and shared memory.

Every variant is compiled with the compiler and assembler that Triton brings, for compute capability 8.0 (A100), 9.0
(H100) and 10.0 (B200), with the tiles of the first guess. Writes a table in Markdown.

Example: headcode bench kernels --out docs/gpu-kernels.md
"""

import dataclasses
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headcode.files import replace_file

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one block may have (NVIDIA's CUDA programming guide, table of compute capabilities)."""
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Variant(NamedTuple):
    """A kind of call whose kernels are compiled."""

    heads: int
    width: int
    norm: str
    value_net: str
    dtype: str = "float32"
    main: bool = False
    """One of the shapes that the tiles are made for: the paper's models. None of these may spill."""
    tf32: bool = False
    length: int = 512
    """From 128 on inputs are packed, and their strides differ."""

    def __str__(self) -> str:
        dtype = "tf32" if self.tf32 else self.dtype
        return f"H{self.heads} T{self.length} D{self.width} {self.norm}, {self.value_net}, {dtype}"


NORMS = ("none", "rms_head", "softmax")
NETS = ("linear", "deep_linear", "relu", "gelu", "silu")
MAIN = (
    *(Variant(8, 2, norm, net, main=True) for norm in NORMS for net in NETS),
    Variant(8, 2, "rms_head", "relu", main=True, length=96),
    Variant(16, 4, "rms_head", "relu", main=True, length=36),
    Variant(16, 8, "rms_head", "relu", "bfloat16", main=True),
    Variant(64, 4, "rms_head", "relu", main=True),
)
OTHERS = (
    Variant(16, 64, "rms_head", "relu"),
    Variant(16, 64, "rms_head", "relu", tf32=True),
    Variant(16, 64, "rms_head", "relu", "bfloat16"),
    Variant(8, 128, "softmax", "linear", "float16"),
    Variant(32, 128, "rms_head", "relu", "bfloat16"),
    Variant(64, 128, "rms_head", "relu", "bfloat16"),
)


class Compiled(NamedTuple):
    """What the assembler says of one kernel."""

    registers: int
    spilled: int
    """Bytes of local memory for each thread."""
    shared: int
    """Bytes of shared memory for each block."""
    matrix_units: bool


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Registers, spills and shared memory of every kernel, compiled without a GPU."""

    out: Path = Path("gpu-kernels.md")
    """The table."""
    capabilities: tuple[int, ...] = CAPABILITIES
    """Compute capabilities, times ten."""
    only_main: bool = False
    """Only the shapes of the paper's models."""

    def run(self) -> None:
        if missing := missing_compiler():
            raise ValueError(missing)
        for capability in self.capabilities:
            if capability not in CAPABILITIES:
                raise ValueError(f"--capabilities must be of {', '.join(map(str, CAPABILITIES))}, got {capability}.")
        rows, bad = [], []
        for variant in MAIN if self.only_main else (*MAIN, *OTHERS):
            for kind, launch in launches(variant).items():
                cells = []
                for capability in self.capabilities:
                    result = compile_launch(launch, capability)
                    cells.append(f"{result.registers} / {result.spilled} / {result.shared / 1024:.0f}")
                    if result.shared > SHARED_LIMIT[capability] or (variant.main and result.spilled):
                        bad.append(f"{variant}, {kind}, {capability}")
                tiles = launch.tiles
                cut = f"{tiles.queries}×{tiles.keys}, {tiles.warps} warps"
                unit = "yes" if result.matrix_units else "no"
                name = f"**{variant}**" if variant.main else str(variant)
                rows.append(f"| {name} | {kind} | {cut} | {unit} | {' | '.join(cells)} |")
                print(rows[-1], flush=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.out, table(rows, self.capabilities).encode())
        print(f"wrote {self.out}")
        if bad:
            raise ValueError(f"Spills in main variants, or too much shared memory: {'; '.join(bad)}.")


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Compiling the GPU kernels needs Triton: pip install 'headcode[triton]' (on Linux)."
    from headcode.ops.triton import backend

    if backend.INTERPRETED:
        return "TRITON_INTERPRET is set, and kernels are interpreted then, not compiled; unset it."
    return None


def launches(variant: Variant) -> dict[str, Any]:
    """Every launch of a forward and backward pass with a band, dropout, a padding mask and causality, on no device."""
    from headcode.ops.options import AttentionInputs, AttentionOptions
    from headcode.ops.triton.plan import TritonCall
    from headcode.ops.triton.tuning import first_guess

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if variant.tf32 else "highest")
    try:
        batch, length, dtype = 8, variant.length, DTYPES[variant.dtype]
        q, k, v = (
            torch.empty(batch, length, variant.heads, variant.width, dtype=dtype, device="meta").transpose(1, 2)
            for _ in range(3)
        )
        saved = torch.empty([batch, variant.heads, length] if variant.norm == "softmax" else [0], device="meta")
        mask = torch.empty(batch, 1, 1, length, dtype=torch.bool, device="meta")
        band = torch.empty(variant.heads, 2 * length - 1, dtype=dtype, device="meta")
        options = AttentionOptions(
            causal=True,
            scale=0.5,
            norm=variant.norm,
            value_net=variant.value_net,
            pooling="sum",
            dropout=0.1,
            dropout_seed=1,
            query_offset=0,
        )
        call = TritonCall(AttentionInputs(q, k, v, mask, None, band), options, saved)
        kinds = ["forward", "query", "key", "band"]
        if variant.norm == "softmax":
            kinds = ["log_sums", *kinds[:1], *([] if variant.value_net == "linear" else ["delta"]), *kinds[1:]]
        result = {}
        for kind in kinds:
            tiles = first_guess(call, kind)
            if kind == "band":
                result[kind] = call.plan_band(tiles)[0]
            else:
                result[kind] = call.plan(kind, tiles, call.targets(tiles, call.outputs(kind))[0])
        return result
    finally:
        torch.set_float32_matmul_precision(before)


def compile_launch(launch: Any, capability: int) -> Compiled:
    """Compile as a launch would: the same constants, and what is known of arguments that are 1 or multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headcode.ops.triton.plan import compile_options, load_kernel

    kernel = load_kernel(launch.kernel)
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in kernel.params:
        name, place = parameter.name, (parameter.num,)
        if name in constants:
            signature[name] = "constexpr"
            continue
        value, fixed = launch.arguments[name], not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            hints[place] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif fixed and value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if fixed and value % 16 == 0:
                hints[place] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=compile_options(launch.tiles))
    with tempfile.NamedTemporaryFile(prefix=".headcode-", suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump said nothing of registers: {usage.strip()[-300:]!r}.")
    spilled = int(found[2]) + int(found[3])
    return Compiled(int(found[1]), spilled, compiled.metadata.shared, "mma" in compiled.asm["ptx"])


def table(rows: list[str], capabilities: tuple[int, ...]) -> str:
    import triton

    columns = [f"sm_{capability}" for capability in capabilities]
    limits = ", ".join(f"sm_{capability} {SHARED_LIMIT[capability] // 1024} kB" for capability in capabilities)
    return "\n".join(
        [
            "# What the Triton kernels compile to",
            "",
            f"Written by `headcode bench kernels` with Triton {triton.__version__}, on a machine without a GPU.",
            "The kernels have never run on one.",
            "",
            "Each call has a relative band, a padding mask, causality and dropout. Cells are registers of a thread /",
            "bytes spilled by a thread / kB of shared memory of a block. **Bold** are the main variants: they may not",
            "spill.",
            f"A block may have at most: {limits}.",
            "",
            f"| call | kernel | tile (queries×keys) | matrix units | {' | '.join(columns)} |",
            f"| --- | --- | --- | --- | {' | '.join('---' for _ in columns)} |",
            *rows,
            "",
        ]
    )
