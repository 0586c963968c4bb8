"""Commands run in this process."""

import pytest

from headcode.cli import main


def exit_code(*arguments):
    """With which code a command stops before its end."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def fails(capsys, *arguments):
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    sentences = [line for line in captured.err.splitlines() if line.startswith("headcode: ")]
    assert captured.out == "" and len(sentences) == 1 and "Traceback" not in captured.err
    return sentences[0]
