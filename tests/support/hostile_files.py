"""Hostile files, made from good ones by a seeded hand, and commands run on them under a watch."""

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headcode.cli import main
from headcode.interop import to_reference
from headcode.nn import load_model
from headcode.presets import override, preset
from headcode.sweep.plan import plan
from headcode.sweep.table import ResultsTable
from headcode.tasks.language import shards
from headcode.train import Runtime, Trainer, read_run_config

SIZES = {"dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 6, "mlp_dim": 8, "num_layers": 2, "backend": "reference"}
SHORT = {"steps": 4, "batch_size": 8, "eval_size": 16, "eval_batch_size": 16, "eval_every": 2, "log_every": 1}
SMALL = {**SIZES, **SHORT, "checkpoint_every": 2}
DEEP = "[" * 100_000 + "]" * 100_000
# Written into JSON as they stand: what Python reads and JSON does not have, and what no reader should believe.
WORDS = ("NaN", "-Infinity", "1e400", "9" * 5000, "[" * 500 + "]" * 500, DEEP, r'"\ud800"', "{]", "1 2")
VALUES = (
    *(None, True, False, -1, 0, 1, 7, 10**6, 10**12, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 5e-324),
    *("", "x", "x" * 10_000, "../../outside", "/etc/passwd", "\0", "\x1b[2J", "…", "0", "inf"),
    *([], [[]], {}, {"a": 1}, [1, "a", None], ["x"] * 1000),
)


class Hang(BaseException):
    """A command that did not end in time."""


class End(NamedTuple):
    """How a command ended: its exit code, what it said, and the error that came through, if one did."""

    code: int | None
    said: str
    error: BaseException | None
    seconds: float


def attempt(arguments: list[str], seconds: float = 20.0) -> End:
    """Run a command in this process; one that takes longer is interrupted, and its error is a Hang."""

    def ring(*_: object) -> None:
        raise Hang(f"headcode {' '.join(arguments)} took more than {seconds} s")

    said, code, error = io.StringIO(), 0, None
    before, begin = signal.signal(signal.SIGALRM, ring), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    except (Exception, Hang) as other:
        code, error = None, other
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return End(code, said.getvalue(), error, time.monotonic() - begin)


def make_world(folder: Path) -> Path:
    """A finished run with everything that commands write beside one, a language model, a sweep, and parameters."""
    run = folder / "run"
    runtime = Runtime(device="cpu", threads=1)
    Trainer(override(preset("logic-small"), **SMALL), run, runtime=runtime).run()
    for arguments in (
        ["decode", "--size", "64", "--controls", "shuffled"],
        ["decode", "--size", "16", "--ablate", "--patch"],
        ["codes", "--size", "64", "--map", "pca"],
    ):
        end = attempt([arguments[0], str(run), *arguments[1:]], seconds=120)
        assert end.code == 0, end
    (run / "card.json").write_text('{"name": "run"}')
    (folder / "text.txt").write_text("the cat sat on the mat, and the dog on the log.\n" * 80)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"position": "none"}).items()]
    words = ["train", "lm", "--text", str(folder / "text.txt"), "--tokenizer", "bytes", "--context", "8", *flags]
    end = attempt([*words, "--out", str(folder / "lm"), "--device", "cpu"], seconds=120)
    assert end.code == 0, end
    index = next(Path(os.environ["HEADCODE_TEXTS"]).glob(f"{read_run_config(folder / 'lm').task.shards[:32]}*"))
    shutil.copytree(index, folder / "texts")
    (only,) = plan([("one", override(preset("logic-small"), **SMALL))], folder / "sweep")
    shutil.copytree(run, only.folder, ignore=shutil.ignore_patterns("analysis", "codes*"))
    table = ResultsTable(folder / "sweep")
    table.announce([only])
    table.write()
    params = to_reference(load_model(run / "checkpoints" / "step-4"))
    np.savez(folder / "params.npz", **params)
    return folder


def copy_world(world: Path, target: Path) -> Path:
    """A world of its own, whose language model finds its tokens in it and nowhere else."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(world, target)
    source = target / "lm" / "text.json"
    source.write_text(json.dumps({**json.loads(source.read_text()), "folder": str(target / "texts")}))
    os.environ["HEADCODE_TEXTS"] = str(target / "store")
    shards._KNOWN.clear()
    return target


class Scene(NamedTuple):
    """A file of the world, and commands that read it; `{}` in a command is the world's folder."""

    file: str
    commands: tuple[str, ...]
    sealed: bool = False
    """Its checkpoint's hashes are made right again: who writes files can compute hashes."""


RUN = ("eval {}/run --size 8", "report {}/run --out {}/page.html", "info {}/run", "codes {}/run --size 8")
SCENES = (
    Scene("run/config.json", RUN),
    Scene("run/metrics.jsonl", ("report {}/run --out {}/page.html", "resume {}/run")),
    Scene("run/environment.json", ("resume {}/run", "report {}/run --out {}/page.html")),
    Scene("run/card.json", ("report {}/run --out {}/page.html",)),
    Scene("run/checkpoints/step-4/config.json", ("info {}/run", "eval {}/run --size 8"), sealed=True),
    Scene(
        "run/checkpoints/step-4/state.json", ("resume {}/run", "eval {}/run --size 8 --checkpoint best"), sealed=True
    ),
    Scene("run/checkpoints/step-4/state.json", ("resume {}/run", "info {}/run/checkpoints/step-4")),
    Scene("run/checkpoints/step-4/model.safetensors", ("resume {}/run", "info {}/run"), sealed=True),
    Scene("run/checkpoints/step-4/optimizer.safetensors", ("resume {}/run",), sealed=True),
    Scene("run/analysis/decode.json", ("report {}/run --out {}/page.html",)),
    Scene("run/analysis/ablate.json", ("report {}/run --out {}/page.html",)),
    Scene("run/analysis/patch.json", ("report {}/run --out {}/page.html",)),
    Scene("run/codes-pca-layer1.npz", ("report {}/run --out {}/page.html",)),
    Scene("lm/config.json", ("generate {}/lm --max-tokens 3", "eval {}/lm --size 2")),
    Scene("lm/tokenizer.json", ("generate {}/lm --max-tokens 3",)),
    Scene("lm/text.json", ("eval {}/lm --size 2",)),
    Scene("texts/index.json", ("eval {}/lm --size 2",), sealed=True),
    Scene("sweep/results.csv", ("results {}/sweep --columns all", "results {}/sweep --group-by seed --json")),
    Scene("sweep/sweep.json", ("results {}/sweep",)),
    Scene("params.npz", ("info {}/params.npz",)),
    Scene("text.txt", ("train lm --text {}/text.txt --tokenizer bytes --steps 1 --out {}/new --device cpu",)),
    Scene("lm/tokenizer.json", ("train lm --text {}/text.txt --tokenizer-file {}/lm --steps 1 --out {}/new",)),
)


def spoil(path: Path, rng: random.Random) -> str:
    """Make a good file hostile, and say how."""
    kinds: list[Callable[[Path, random.Random], str]] = [_spoil_bytes, _spoil_kind]
    kinds += [_spoil_json] * 8 if path.suffix in (".json", ".jsonl") else []
    kinds += [_spoil_table] * 4 if path.suffix == ".csv" else []
    kinds += [_spoil_arrays] * 4 if path.suffix == ".npz" else []
    return rng.choice(kinds)(path, rng)


def seal(world: Path, path: Path) -> None:
    """Make the hashes around a changed file right again, as whoever changed it could."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size >= 2**30:
        return
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        if path.name == "index.json":
            index = json.loads(path.read_text())
            content = {k: v for k, v in index.items() if k not in ("fingerprint", "recipe", "source")}
            index["fingerprint"] = _hash(json.dumps(content, sort_keys=True, separators=(",", ":")))
            path.write_text(json.dumps(index))
            for name, key in (("config.json", "shards"), ("text.json", "shards")):
                facts = json.loads((world / "lm" / name).read_text())
                facts.get("task", facts)[key] = index["fingerprint"]
                (world / "lm" / name).write_text(json.dumps(facts))
            return
        state = path.with_name("state.json")
        content = json.loads(state.read_text())
        if path != state:
            content["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        content.pop("sha256", None)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        state.write_text(json.dumps({**content, "sha256": _hash(text)}))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _spoil_bytes(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    contents = {
        "empty": b"",
        "not UTF-8": b"\xff\xfe" + bytes(content),
        "cut": bytes(content[: rng.randrange(len(content) + 1)]),
        "deep": DEEP.encode(),
        "null": b"null",
        "a list": b"[]",
        "twice": bytes(content) * 2,
        "zeros": bytes(len(content)),
    }
    how = rng.choice([*contents, "flipped"])
    if how == "flipped":
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        contents[how] = bytes(content)
    path.write_bytes(contents[how])
    return how


def _gigabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a gigabyte": _gigabyte,
    "a loop of links": lambda path: path.symlink_to(path),
}
"""What can stand in a file's place: by its name, how it is made there."""


def _spoil_kind(path: Path, rng: random.Random) -> str:
    how = rng.choice(list(NO_FILES))
    path.unlink()
    NO_FILES[how](path)
    return how


def _spoil_json(path: Path, rng: random.Random) -> str:
    lines = path.suffix == ".jsonl"
    values = [json.loads(line) for line in path.read_text().splitlines()] if lines else json.loads(path.read_text())
    changes = []
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        holder, key = rng.choice(_places(values) or [([values], 0)])
        action = rng.choice(["replace", "replace", "replace", "remove", "add", "word"])
        if action == "remove":
            holder.pop(key)
        elif action == "add" and isinstance(holder, dict):
            holder[rng.choice(["extra", "", "\x1b[2J", "x" * 5000])] = _value(rng)
        else:
            holder[key] = f"@{rng.randrange(len(WORDS))}@" if action == "word" else _value(rng)
        changes.append(f"{action} {key!r:.40}")
    text = "".join(json.dumps(value) + "\n" for value in values) if lines else json.dumps(values, indent=1)
    for number, word in enumerate(WORDS):
        text = text.replace(f'"@{number}@"', word)
    path.write_text(text)
    return ", ".join(changes)


def _value(rng: random.Random) -> object:
    """A copy of one of VALUES: the dict itself, put into a file twice, could come to hold itself."""
    return copy.deepcopy(rng.choice(VALUES))


def _places(value: object) -> list[tuple[dict | list, object]]:
    found, waiting = [], [value]
    while waiting:
        part = waiting.pop()
        inner = (
            list(part.items()) if isinstance(part, dict) else list(enumerate(part)) if isinstance(part, list) else []
        )
        found += [(part, key) for key, _ in inner]
        waiting += [child for _, child in inner]
    return found


def _spoil_table(path: Path, rng: random.Random) -> str:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    word = rng.choice([*WORDS, *map(str, VALUES), '"', "a,b", '"x\ny"', "-", "1_000"])
    rows[row][column % len(rows[row])] = word
    path.write_text("\n".join(",".join(cells) for cells in rows) + "\n")
    return f"cell {row}, {column}: {word!r:.40}"


def _spoil_arrays(path: Path, rng: random.Random) -> str:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    name = rng.choice(list(arrays))
    array = arrays[name]
    odd = {
        "empty": array[..., :0] if array.ndim else np.zeros(0),
        "scalar": np.array(7),
        "another shape": array.reshape(-1),
        "more axes": array[None],
        "NaN": np.full(array.shape, np.nan),
        "huge": np.full(array.shape, 1e308),
        "integers": np.full(array.shape, -(2**62)),
        "words": np.full(array.shape, "word"),
        "objects": np.full(array.shape, {"a": 1}, dtype=object),
        "records": np.zeros(array.shape, dtype=[("a", "f4"), ("b", "i8")]),
        "complex": np.ones(array.shape, dtype=complex),
        "dates": np.zeros(array.shape, dtype="M8[s]"),
    }
    how = rng.choice([*odd, "removed", "renamed"])
    if how in odd:
        arrays[name] = odd[how]
    else:
        arrays.pop(name)
    if how == "renamed":
        arrays["../" + name] = array
    np.savez(path, **arrays)
    return f"{name} {how}"
