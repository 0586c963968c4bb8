"""headcode explore: its mistakes are one sentence, and it listens on this machine alone."""

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from headcode.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/at-all"], "/nowhere/at-all"),
        (["zoo/nobody"], "nobody"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--text", "Hello."], "--lens FOLDER"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(["explore", *arguments])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("headcode: ") and said.count("\n") == 1 and words in said


def test_a_missing_dash_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dash", None)
    with pytest.raises(SystemExit):
        main(["explore"])
    assert "pip install 'headcode[explorer]'" in capsys.readouterr().err


def refused(port):
    """The status of a request that announces far more than it may have: it is refused before it is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = f"POST /_dash-update-component HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {10**9}\r\n\r\n"
        connection.sendall(head.encode())
        return int(connection.recv(4096).split()[1])


@pytest.mark.slow
def test_it_serves_on_this_machine_alone_and_says_when_a_port_is_taken():
    command = [sys.executable, "-m", "headcode", "explore", "zoo/logic-hyla", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            said = r"headcode explorer: (http://127\.0\.0\.1:(\d+)/)(\?token=[\w-]{32}) \(Ctrl-C ends it\)\n"
            address, port, token = re.fullmatch(said, line).groups()
            port = int(port)
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(address, timeout=60)
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(address + token, timeout=60) as page:
                assert page.url == address and b"headcode explorer" in page.read()
            with opener.open(address + "_dash-layout", timeout=60) as layout:
                assert b"See a code decide" in layout.read()
            for address in {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}:
                if not address.startswith("127."):
                    with pytest.raises(OSError, match="refused"):
                        socket.create_connection((address, port), timeout=10)
            assert refused(port) == 413
            second = subprocess.run([*command[:-1], str(port)], capture_output=True, text=True, timeout=300)
            assert second.returncode == 2 and f"Port {port} is not free" in second.stderr
        finally:
            server.terminate()


def test_no_token_opens_it_to_every_user_of_the_machine(capsys, monkeypatch):
    from headcode.explorer import server

    monkeypatch.setattr(server.Server, "run", lambda self: None)
    said = {}
    for flag in ("--token", "--no-token"):
        main(["explore", "zoo/logic-hyla", "--port", "0", flag])
        said[flag] = capsys.readouterr().out
    assert re.search(r"/\?token=[\w-]{32} ", said["--token"])
    assert re.search(r":\d+/ \(Ctrl-C", said["--no-token"])
