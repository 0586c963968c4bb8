"""A wheel, built from this tree and installed in an empty venv elsewhere, imports and runs."""

import os
import subprocess
import sys
import venv

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT], check=True, capture_output=True
    )
    (built,) = folder.glob("headcode-*.whl")
    return built


def test_wheel_in_an_empty_venv(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    # torch and numpy alone first: the package itself must import with no more than that.
    subprocess.run([*install, "torch==2.13.0", "numpy"], check=True)
    subprocess.run([*install, "--no-deps", wheel], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    use = "import torch, headcode; print(headcode.HyperAttention(8, 4)(torch.randn(2, 5, 8)).shape, headcode.__file__)"
    out = subprocess.run([python, "-c", use], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert out.stdout.startswith("torch.Size([2, 5, 8])") and str(tmp_path) in out.stdout

    subprocess.run([*install, wheel], check=True)
    headcode = tmp_path / "venv" / "bin" / "headcode"
    make = (
        "from headcode import ModelConfig, Transformer; from headcode.nn import save_model;"
        "save_model(Transformer(ModelConfig(input_dim=5, output_dim=1, max_length=16)), 'model')"
    )
    subprocess.run([python, "-c", make], cwd=tmp_path, env=environment, check=True)
    info = subprocess.run([headcode, "info", "model"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert info.returncode == 0 and "151,009" in info.stdout, info.stderr
    demo = [headcode, "demo", "--steps", "20", "--puzzles", "50"]
    shown = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and (tmp_path / "out/demo/report.html").stat().st_size > 100_000, shown.stderr
