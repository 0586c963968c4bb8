"""A sweep on a real Ray cluster of two nodes on this machine, one of which is lost under way."""

import json
import os
import signal
import threading
import time
from importlib.util import find_spec

import pytest

from headcode.sweep import grid, run_sweep
from headcode.sweep.engines import make_engine
from headcode.sweep.plan import plan
from headcode.sweep.ray_engine import import_ray
from headcode.train import Runtime
from headcode.train.folder import is_in_use, read_environments
from tests.support.sweeps import Listener, results_of, small_config

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="the extra headcode[ray] is not installed"),
]


@pytest.fixture
def cluster():
    """Two nodes with one CPU each; everything on 127.0.0.1, no dashboard, no usage reports."""
    import_ray(on_loopback=True)
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    cluster.second = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.1")
    yield cluster
    cluster.shutdown()


def processes_below(pid):
    """A process and all that descend from it."""
    found, parents = {pid}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                parents[int(entry)] = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening_addresses(pids):
    """The local addresses on which processes wait for connections, from the system's own tables."""
    sockets = set()
    for pid in pids:
        try:
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
        except OSError:
            continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    addresses.add(fields[1].split(":")[0])
    return addresses


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.kills
def test_one_of_two_nodes_is_lost(cluster, tmp_path):
    """All runs finish, those of the lost node on the other one, with the results of local processes."""
    configs = dict(grid(small_config(steps=2000, eval_every=1000, checkpoint_every=50, log_every=250), seed=range(4)))
    runs = plan(configs, tmp_path / "ray")
    lost = []

    def lose_a_node():
        # Both nodes are at work as soon as two runs have checkpoints.
        while sum((run.folder / "checkpoints").is_dir() and is_in_use(run.folder) for run in runs) < 2:
            time.sleep(0.05)
        lost.append(sum(is_finished_at(run) for run in runs))
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=lose_a_node)
    killer.start()
    listener = Listener()
    rows = run_sweep(
        configs,
        tmp_path / "ray",
        engine="ray",
        device="cpu",
        threads=1,
        address=cluster.address,
        display=listener,
    )
    killer.join()
    assert lost == [0]
    assert [row["error"] for row in rows] == [None] * 4
    starts = [[start["step"] for start in read_environments(run.folder)] for run in runs]
    assert sorted(map(len, starts))[-1] >= 2, "a run of the lost node began again"
    assert any(step > 0 for steps in starts for step in steps), "and not from the beginning"
    run_sweep(configs, tmp_path / "local", jobs=2, device="cpu", threads=1, display=Listener())
    assert results_of(tmp_path / "ray") == results_of(tmp_path / "local")


def is_finished_at(run):
    return (run.folder / "checkpoints" / f"step-{run.config.steps}").is_dir()


def test_a_cluster_of_this_machine_alone(tmp_path, monkeypatch):
    """Nothing listens beyond 127.0.0.1, and runs that never fit are refused; stopping saves what is at work.

    Also where SIGINT is ignored, as in the background of a shell: Ray's processes inherit that.
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    runtime = Runtime(device="cpu", threads=1)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = make_engine("ray", tmp_path, 1, runtime, {})
    finally:
        signal.signal(signal.SIGINT, handler)
    run = plan({"a": small_config(steps=10**6, eval_every=0)}, tmp_path)[0]
    try:
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        addresses = listening_addresses(processes_below(os.getpid()))
        assert addresses and addresses <= LOOPBACK
        with pytest.raises(ValueError, match="A run needs 1 CPUs and 64 GPUs, and no node"):
            make_engine("ray", tmp_path, 1, runtime, {"num_gpus": 64})
        engine.start(run)
        assert not engine.has_room()
        deadline = time.monotonic() + 120
        while not (run.folder / "checkpoints").is_dir():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert read_environments(run.folder)[0]["threads"] == 1
        engine.stop()
        ended = []
        while not ended:
            assert time.monotonic() < deadline
            ended = engine.poll()
            time.sleep(0.05)
        assert ended[0][1].state == "stopped"
    finally:
        engine.close()
    deadline = time.monotonic() + 60
    while is_in_use(run.folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    log = tmp_path / "logs" / f"{run.hash}.log"
    assert "Training was stopped at step" in log.read_text()
    saved = sorted(json.loads((f / "state.json").read_text())["step"] for f in (run.folder / "checkpoints").iterdir())
    assert f"stopped at step {saved[-1]} " in log.read_text()


def test_an_address_without_a_cluster(tmp_path):
    with pytest.raises(ValueError, match="There is no Ray cluster at 127.0.0.1:1 "):
        run_sweep({"a": small_config()}, tmp_path / "out", engine="ray", address="127.0.0.1:1", display=Listener())
    assert not (tmp_path / "out").exists()
