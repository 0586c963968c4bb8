"""One process or many: the same batches, the same weights; and a dead process is no end.

All on the loopback interface with gloo.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.support import ROOT
from tests.support.training import outcome

pytestmark = pytest.mark.slow

SIZES = "--num-points 7 --dim 10 --num-heads 2 --qk-dim 6 --v-dim 6 --mlp-dim 11 --batch-size 12 --backend reference"
EVALUATION = "--log-every 5 --eval-every 25 --eval-size 23 --eval-batch-size 5"
RUN = f"train logic {SIZES} {EVALUATION} --checkpoint-every 10 --threads 1"
ENVIRONMENT = {**os.environ, "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def torchrun(processes, arguments, *options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*launcher, "--master-addr", "127.0.0.1", "--master-port", str(port), *options, "-m", "headcode", *arguments]


def finish(command, **options):
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr
    return done


def weights(run, step, file="model.safetensors"):
    return load_file(run / "checkpoints" / f"step-{step}" / file)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    finish([sys.executable, "-m", "headcode", *RUN.split(), "--steps", "50", "--out", str(out)])
    return out


@pytest.mark.parametrize("options", [[], ["--accumulate", "3"], ["--fsdp"]], ids=["ddp", "ddp-accumulate", "fsdp"])
def test_two_processes_agree_with_one(alone, tmp_path, options):
    done = finish(torchrun(2, [*RUN.split(), "--steps", "50", "--out", str(tmp_path / "run"), *options]))
    assert done.stdout.count("hyla on logic") == 1  # the main process talks, the other does not
    for file, relative, absolute in (("model.safetensors", 0.0, 1e-5), ("optimizer.safetensors", 1e-3, 1e-4)):
        one, two = weights(alone, 50, file), weights(tmp_path / "run", 50, file)
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=relative, atol=absolute)
    records = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (alone, tmp_path / "run")
    ]
    assert len(records[0]) == len(records[1])
    for one, two in zip(*records, strict=True):
        assert one["step"] == two["step"] and one["loss"] == pytest.approx(two["loss"], rel=1e-4)


@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=["ddp", "fsdp"])
def test_auxiliary_targets_agree_as_well(tmp_path, options):
    """In float64: a small model on SRAVEN, whatever its targets, blows up float32's rounding within ten steps."""
    sizes = SIZES.replace("--num-points 7", "--num-features 2")
    settings = "--preset sraven-small --num-layers 3 --auxiliary-weight 1 --steps 10 --threads 1 --precision float64"
    run = f"train sraven {settings} {sizes} {EVALUATION}".split()
    finish([sys.executable, "-m", "headcode", *run, "--out", str(tmp_path / "one")])
    finish(torchrun(2, [*run, "--out", str(tmp_path / "two"), *options]))
    one, two = weights(tmp_path / "one", 10), weights(tmp_path / "two", 10)
    assert "hint_projs.0.weight" in one and one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0.0, atol=1e-9)


SHARDED = "--fsdp --steps 30 --ema-decay 0.9 --clip-norm 0.1 --accumulate 2 --checkpoint-every 12"


def test_a_sharded_run_with_everything_resumes_bit_for_bit(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(torchrun(2, [*RUN.split(), *SHARDED.split(), "--out", str(whole)]))
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step-30")
    finish(torchrun(2, ["resume", str(broken)]))
    assert json.loads((broken / "environment.json").read_text())["starts"][1]["step"] in (24, 25)
    assert outcome(whole) == outcome(broken)
    files = [run / "checkpoints" / "step-30" / "ema.safetensors" for run in (whole, broken)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_processes_divide_the_batch(tmp_path):
    """What each process of a group of three is given adds up to the single stream, and nothing is given twice."""
    script = tmp_path / "shares.py"
    script.write_text(
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.support.training import small_config, train\n"
        "from headcode.train import task_loss\n"
        "seen = []\n"
        "def loss(context):\n"
        "    seen.append([context.step, context.batch.info['instance'].tolist(), context.seed])\n"
        "    return task_loss(context)\n"
        "train(small_config(steps=4, batch_size=12, accumulate=2, eval_size=0), loss=loss)\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(json.dumps(seen))\n"
    )
    command = torchrun(3, [])
    finish([*command[: command.index("-m", 3)], str(script), str(tmp_path)])
    shares = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    for step in range(4):
        numbers = [n for share in shares for s, part, _ in share if s == step for n in part]
        assert sorted(numbers) == list(range(step * 12, step * 12 + 12))
        assert len({seed for share in shares for s, _, seed in share if s == step}) == 1


def test_a_batch_that_cannot_be_divided(tmp_path):
    command = torchrun(2, [*RUN.split(), "--steps", "50", "--batch-size", "11", "--out", str(tmp_path / "run")])
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("headcode: batch_size 11 cannot be divided among 2 processes") == 1
    assert not (tmp_path / "run").exists()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@contextlib.contextmanager
def end_of(group):
    """A group that hangs fails its test and does not hold up the others."""
    try:
        yield
    except BaseException:
        for pid in [*children(group.pid), group.pid]:
            os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.kills
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds the processes of a group by /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_restarts_the_group_from_the_last_checkpoint(tmp_path, victim):
    arguments = [*RUN.split(), "--steps", "400", "--checkpoint-every", "20", "--eval-every", "0"]
    finish(torchrun(2, [*arguments, "--out", str(tmp_path / "whole")]))
    command = torchrun(2, [*arguments, "--out", str(tmp_path / "broken")], "--max-restarts", "3")
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as group, end_of(group):
        deadline = time.monotonic() + 120
        while not (tmp_path / "broken" / "checkpoints" / "step-40").exists():
            assert time.monotonic() < deadline and group.poll() is None
            time.sleep(0.02)
        os.kill(sorted(children(group.pid))[victim], signal.SIGKILL)
        _, words = group.communicate(timeout=240)
    assert group.returncode == 0, words
    starts = json.loads((tmp_path / "broken" / "environment.json").read_text())["starts"]
    assert len(starts) == 2 and starts[1]["step"] >= 40
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "broken")


def test_two_processes_read_the_text_of_one(tmp_path, monkeypatch):
    """The windows of a step do not depend on how many processes share them, and one of them prepares the text."""
    (tmp_path / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    monkeypatch.setitem(ENVIRONMENT, "HEADCODE_TEXTS", str(tmp_path / "texts"))
    sizes = "--tokenizer bytes --context 16 --num-layers 2 --dim 10 --num-heads 2 --qk-dim 8 --v-dim 6 --mlp-dim 11"
    # In float64, so that sums in another order stay far below what another window would change.
    rest = "--batch-size 12 --backend reference --threads 1 --steps 20 --log-every 5 --eval-size 9 --eval-batch-size 2"
    arguments = [
        "train",
        "lm",
        *sizes.split(),
        *rest.split(),
        "--precision",
        "float64",
        "--text",
        str(tmp_path / "text.txt"),
    ]
    done = finish(torchrun(2, [*arguments, "--out", str(tmp_path / "two")]))
    assert done.stdout.count("hyla on lm") == 1 and done.stderr.count("tokens of train") == 1
    finish([sys.executable, "-m", "headcode", *arguments, "--out", str(tmp_path / "one")])
    one, two = weights(tmp_path / "one", 20), weights(tmp_path / "two", 20)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-9)
    records = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "two")
    ]
    for first, second in zip(*records, strict=True):
        assert first["step"] == second["step"] and first["loss"] == pytest.approx(second["loss"], rel=1e-10)


def test_a_refused_folder_is_told_by_one_process(alone):
    done = subprocess.run(
        torchrun(2, [*RUN.split(), "--steps", "51", "--out", str(alone)]),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("headcode:")]
    assert "steps" in said
