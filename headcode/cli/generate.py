"""Let a trained language model go on with a text, token by token.

Example: headcode generate runs/lm-small-hyla-seed0 --prompt "def main(" --temperature 0.8 --top-p 0.95
"""

import dataclasses
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from headcode.cli._training import Switch, print_json, say_warning

if TYPE_CHECKING:  # the help of a command needs no torch
    from headcode.nn import Transformer
    from headcode.tasks.language.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Arguments of `headcode generate`."""

    run_folder: tyro.conf.Positional[Path]
    """The run folder of a language model."""
    prompt: str = ""
    """The text to go on with; the beginning of a document if empty."""
    max_tokens: int = 200
    """New tokens, at most; fewer if the document ends, or if the model has no positions left (T5 band)."""
    temperature: float = 0.8
    """Divides the logits: 0 takes the most probable token each time, 1 draws as the model says."""
    top_k: int | None = None
    """Draw from that many of the most probable tokens; from all of them unless given."""
    top_p: float = 1.0
    """Draw from the most probable tokens that together have this probability."""
    seed: int = 0
    """Of the draws."""
    checkpoint: str = "last"
    """last, best or a name such as step-500."""
    tokenizer: Path | None = None
    """The tokenizer.json of the run, if it is not in its folder any more."""
    cache: bool = True
    """Keep the past of every layer; --no-cache computes everything anew for every token, with the same result."""
    recurrent: bool | None = None
    """Keep a state of constant size (method linear with rotary or no positions); wherever possible unless given."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int | None = None
    """CPU threads; torch's choice unless given."""
    json: Switch = False
    """Print one JSON object at the end instead of the text as it comes."""

    def run(self) -> None:
        from headcode.train.checkpoint import choose_checkpoint, load_from
        from headcode.train.folder import read_run_config, tokenizer_of
        from headcode.train.runtime import find_device, numerics

        warnings.showwarning = say_warning
        config = read_run_config(self.run_folder)
        if not config.task.reads_text:
            raise ValueError(f"{self.run_folder} is a run of {config.task.name}; text comes from runs of lm.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads must be 1 or more, got {self.threads}.")
        tokenizer = tokenizer_of(self.run_folder, config, self.tokenizer)
        checkpoint = choose_checkpoint(self.run_folder, self.checkpoint)
        device = find_device(self.device)
        model = load_from(checkpoint).to(device)
        prompt = tokens_of(self.prompt, tokenizer)
        with numerics("float32", device, self.threads):
            self._tell(prompt, self._generate(model, prompt, tokenizer), tokenizer, model)

    def _generate(self, model: "Transformer", prompt: list[int], tokenizer: "Tokenizer") -> Any:
        from headcode.nn.generation import generate

        if self.recurrent and not self.cache:
            raise ValueError("--recurrent keeps a state of the past, which --no-cache forbids; leave one out.")
        names = ("temperature", "top_k", "top_p", "seed", "cache", "recurrent")
        options: Any = {name: getattr(self, name) for name in names}
        return generate(model, prompt, self.max_tokens, end_token=tokenizer.end_token, **options)

    def _tell(self, prompt: list[int], tokens: Any, tokenizer: "Tokenizer", model: "Transformer") -> None:
        from headcode.nn.config import can_recur
        from headcode.tasks.language.tokenizer import TextStream

        stream = TextStream(tokenizer, prompt)
        given: list[int] = []
        pieces: list[str] = []

        def tell(piece: str) -> None:
            pieces.append(piece)
            if not self.json:
                sys.stdout.write(piece)
                sys.stdout.flush()

        if not self.json:
            sys.stdout.write(self.prompt)
        for token in tokens:
            given.append(token)
            tell(stream.add(token))
        tell(stream.finish())
        if self.json:
            recurrent = self.cache and (can_recur(model.config) if self.recurrent is None else self.recurrent)
            facts = {"prompt": self.prompt, "text": "".join(pieces), "tokens": given}
            print_json({**facts, "ended": len(given) < self.max_tokens, "recurrent": recurrent})
        else:
            print()


def tokens_of(prompt: str, tokenizer: "Tokenizer") -> list[int]:
    """The prompt's tokens; nothing is the end of the document before."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # Python keeps bytes of the command line that are not UTF-8 as lone surrogates
        raise ValueError(f"--prompt must be text in UTF-8, and its character {error.start + 1} is not.") from None
    if prompt:
        return tokenizer.encode([prompt])[0].tolist()
    if tokenizer.end_token is None:
        raise ValueError("This tokenizer has no token between documents, so generation needs a --prompt.")
    return [tokenizer.end_token]
