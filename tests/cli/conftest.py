import pytest

from headcode.cli import main


@pytest.fixture
def run(capsys):
    """Runs a command here: its exit code, and what it printed to stdout and stderr."""

    def call(*arguments):
        code = 0
        try:
            main(list(arguments))
        except SystemExit as stopped:
            code = stopped.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
