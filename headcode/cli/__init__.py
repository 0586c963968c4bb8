"""The `headcode` command: one file per subcommand, each with a `Command` dataclass that has a `run` method."""

import contextlib
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence

from headcode import jit
from headcode.suggest import no_such

# name -> what it is for; the module of the same name is imported only when the command is used.
COMMANDS = {
    "demo": "See the hypernetwork inside an attention layer.",
    "train": "Train a model on a task, into a run folder.",
    "resume": "Go on with a run from its last checkpoint.",
    "sweep": "Train many runs, each once, whatever dies on the way.",
    "results": "Look at the results of a sweep: filter, sort, group.",
    "eval": "Metrics of a trained run on its task's splits.",
    "reproduce": "Make a figure of the paper: train, analyse, draw, compare.",
    "codes": "Capture the codes of a run over any split, with labels.",
    "decode": "Decode rules and terms from codes, patch and ablate them.",
    "lens": "Read a pretrained transformer's attention as a hypernetwork.",
    "generate": "Let a language model go on with a text.",
    "puzzle": "Look at one instance of a task: terminal, PNG, SVG.",
    "export": "Write a split as Parquet, JSONL, NPZ or text prompts.",
    "score": "Score anyone's answers to exported puzzles.",
    "report": "One HTML page about a run, or comparing several.",
    "explore": "See codes decide, in the browser: a local web app.",
    "bench": "Measure the attention backends or the tasks.",
    "info": "Parameters, shapes and FLOPs of a checkpoint.",
    "warmup": "Compile the presets' kernels ahead, so that nobody waits.",
}
CLOSED_PIPE = 141
"""Exit code when the reader of our output (head, less) has gone: 128 + SIGPIPE, as other programs end."""

LONGEST_SENTENCE = 2000
"""Characters of an error that are shown: it may quote a file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. A user's mistake ends with exit code 2 and one sentence, never a traceback."""
    try:
        try:
            _carry_out(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a closed pipe can be caught, and not at the interpreter's end
    except BrokenPipeError:
        drop_output()
        raise SystemExit(CLOSED_PIPE) from None


def drop_output() -> None:
    """Send what is still to be written nowhere: nobody reads it, and the interpreter would complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _carry_out(arguments: list[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without our characters shows "?", not an error
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return
    if arguments[0] in ("-V", "--version"):
        from headcode.version import __version__

        print(f"headcode {__version__}")
        return
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        _fail(no_such("There is no command", name, COMMANDS, "the commands are"))
    jit.announce = lambda sentence: print(f"headcode: {sentence}", file=sys.stderr)
    try:
        module = importlib.import_module(f"headcode.cli.{name}")
        if hasattr(module, "parse"):  # a command whose flags depend on its arguments
            command = module.parse(rest)
        else:
            command = parse_with_tyro(module.Command, name, module.__doc__ or "", rest)
        command.run()
    except BrokenPipeError:  # an OSError that is nobody's mistake
        raise
    except KeyboardInterrupt:
        print("headcode: interrupted.", file=sys.stderr)
        raise SystemExit(130) from None
    except (ValueError, OSError, ModuleNotFoundError, MemoryError, RuntimeError) as error:
        sentence = _out_of_memory(error) if isinstance(error, (MemoryError, RuntimeError)) else _one_line(error)
        if sentence is None or os.environ.get("HEADCODE_TRACEBACK"):
            raise
        _fail(sentence)


def parse_with_tyro(cls: type, name: str, doc: str, arguments: list[str]):  # type: ignore[no-untyped-def]
    """An instance of a command's dataclass, or exit code 2 and one sentence."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls,
                prog=f"headcode {name}",
                description=textwrap.dedent(doc),
                args=arguments,
                config=(tyro.conf.PositionalMetavarFromFieldName,),
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        from headcode.cli._mistakes import in_one_sentence

        _fail(in_one_sentence(cls, f"headcode {name}", arguments, complaint.getvalue()))


def _out_of_memory(error: Exception) -> str | None:
    """A sentence for an allocation that failed, torch's included; None for every other error."""
    words = _one_line(error)
    if isinstance(error, MemoryError) or "allocate memory" in words or "out of memory" in words:
        return f"There is not enough memory for this; use smaller sizes ({words[:200]})."
    return None


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= LONGEST_SENTENCE else f"{words[:LONGEST_SENTENCE]} …"


def _fail(sentence: str) -> None:
    print(f"headcode: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headcode COMMAND [options]",
            "",
            "Attention as a hypernetwork.",
            "",
            "commands:",
            *lines,
            "",
            "headcode COMMAND --help shows the options of a command and an example.",
        ]
    )
