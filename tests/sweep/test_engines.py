"""Engines with real processes: outcomes, thread caps, orphans, Slurm's local executor, what is missing."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time

import pytest

from headcode.sweep import SweepFailed, config_hash, grid, run_sweep
from headcode.sweep.engines import LocalEngine, available_cores, default_threads, make_engine
from headcode.sweep.plan import plan
from headcode.sweep.process import THREAD_VARIABLES, Worker, log_of, order_for, wait_for, worker_environment
from headcode.sweep.ray_engine import _connect
from headcode.sweep.status import is_finished
from headcode.train import Runtime
from headcode.train.folder import is_in_use, read_environments
from headcode.train.interruption import Interruption
from tests.support import ROOT
from tests.support.sweeps import Listener, results_of, small_config

CPU = Runtime(device="cpu", threads=1)


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def checkpoints(run):
    return list((run.folder / "checkpoints").glob("step-*"))


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs limits that can be set from outside")
def test_a_worker_whose_log_has_no_room_still_answers(tmp_path):
    run = plan({"a": small_config()}, tmp_path)[0]
    order = json.loads(order_for(run, CPU, wait=False))
    worker = Worker(worker_environment(1), log_of(run))
    try:
        for wrong in ({"seed": -1}, {"steps": "x"}, {"batch_size": 0}):
            worker.begin(json.dumps(order | {"config": order["config"] | wrong}))
            outcome = wait_for(worker)
            assert outcome.state == "failed" and next(iter(wrong)) in outcome.message
            # From here on no file of this process may grow.
            resource.prlimit(worker._process.pid, resource.RLIMIT_FSIZE, (0, 0))
        assert worker.can_go_on()
        assert log_of(run).read_text().count("headcode: ") == 1
    finally:
        worker.end(30)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A working folder whose modules leave a mark when they are imported; the mark's path."""
    for name in ("json", "torch", "numpy", "headcode", "submitit", "cloudpickle"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write(__name__)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "mark"


def test_a_worker_imports_nothing_from_the_working_folder(tmp_path, trap):
    run = plan({"a": small_config(steps=7)}, tmp_path / "sweep")[0]
    worker = Worker(worker_environment(1), log_of(run))
    try:
        worker.begin(order_for(run, CPU, wait=False))
        assert wait_for(worker) == ("finished", "")
    finally:
        worker.end(30)
    assert not trap.exists()
    subprocess.run([sys.executable, "-m", "headcode.sweep.worker"], capture_output=True, stdin=subprocess.DEVNULL)
    assert trap.exists()  # Python's own -m falls into it


def test_a_slurm_job_imports_nothing_from_the_working_folder(tmp_path, trap):
    pytest.importorskip("submitit")
    engine = make_engine("slurm", tmp_path / "sweep", 1, CPU, {"cluster": "local"})
    command = shlex.split(engine._executor._executor._submitit_command_str)
    job = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SUBMITIT_EXECUTOR": "local"})
    assert "submitit" in job.stderr and "SUBMITIT_LOCAL_JOB_ID" in job.stderr  # it began, and finds no job to do
    assert not trap.exists()


def test_a_worker_finishes_fails_and_stops(tmp_path):
    """One process: a run that diverges, one that finishes, and one that is asked to stop."""
    bad, good, long = plan(
        {
            "bad": small_config(learning_rate=1e30, steps=20),
            "good": small_config(steps=12),
            "long": small_config(steps=10**6, eval_every=0, checkpoint_every=5),
        },
        tmp_path,
    )
    worker = Worker(worker_environment(1), tmp_path / "logs" / "log")
    try:
        (tmp_path / "logs").mkdir(exist_ok=True)
        worker.begin(order_for(bad, CPU, wait=False))
        outcome = wait_for(worker)
        assert outcome.state == "failed" and "training stopped before the update" in outcome.message
        assert worker.can_go_on()
        worker.begin(order_for(good, CPU, wait=False))
        assert wait_for(worker) == ("finished", "") and is_finished(good.folder, good.config)
        worker.begin(order_for(long, CPU, wait=False))
        wait_until(lambda: checkpoints(long))
        assert worker.poll() is None and is_in_use(long.folder)
        worker.stop()
        outcome = wait_for(worker)
        assert outcome.state == "stopped" and "Training was stopped at step" in outcome.message
        assert not is_in_use(long.folder)
        assert read_environments(good.folder)[0]["threads"] == 1
    finally:
        worker.end(10)
    assert "headcode: The " in (tmp_path / "logs" / f"{bad.hash}.log").read_text()
    assert "training from step 0 to 12" in (tmp_path / "logs" / f"{good.hash}.log").read_text()


ORPHAN = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.sweeps import small_config
from headcode.sweep.engines import LocalEngine
from headcode.sweep.plan import plan
from headcode.train import Runtime

engine = LocalEngine(1, Runtime(device="cpu", threads=1))
engine.start(plan({{"a": small_config(steps=10**6, eval_every=0)}}, Path({out!r}))[0])
print(engine._workers[0]._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.kills
def test_no_run_outlives_its_sweep(tmp_path):
    """The sweep is killed with SIGKILL: its run saves and ends by itself, and lets go of the folder."""
    code = ORPHAN.format(root=str(ROOT), out=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(parent.stdout.readline())
        run = plan({"a": small_config(steps=10**6, eval_every=0)}, tmp_path)[0]
        wait_until(lambda: checkpoints(run))
        assert is_in_use(run.folder)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_in_use(run.folder))
    wait_until(lambda: not is_running(worker))
    log = (tmp_path / "logs" / f"{run.hash}.log").read_text()
    assert "Training was stopped at step" in log and "Traceback" not in log
    saved = max(int(folder.name.removeprefix("step-")) for folder in checkpoints(run))
    assert f"stopped at step {saved} " in log


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_threads_are_capped(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    environment = worker_environment(3)
    assert {environment[name] for name in THREAD_VARIABLES} == {"3"} and "WORLD_SIZE" not in environment
    assert default_threads(1) == available_cores() and default_threads(10**6) == 1


def test_every_job_gets_its_own_gpu(monkeypatch):
    from headcode.sweep import engines

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [engines._gpu_of(slot, "auto") for slot in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "0"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert engines._gpu_of(1, "cuda") == {"CUDA_VISIBLE_DEVICES": "7"}
    assert engines._gpu_of(1, "cpu") == {} == engines._gpu_of(1, "cuda:0")


@pytest.mark.parametrize(("engine", "extra"), [("ray", "ray"), ("slurm", "slurm")])
def test_a_missing_extra_is_named(engine, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, {"ray": "ray", "slurm": "submitit"}[engine], None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install 'headcode\\[{extra}\\]'"):
        run_sweep({"a": small_config()}, tmp_path / "out", engine=engine, display=Listener())
    assert not (tmp_path / "out").exists()


def test_options_that_engines_do_not_have(tmp_path):
    with pytest.raises(ValueError, match="engine ray has no option 'partition'; it has: address, num_gpus"):
        make_engine("ray", tmp_path, None, CPU, {"partition": "gpu"})
    with pytest.raises(ValueError, match="submitit refuses the options"):
        make_engine("slurm", tmp_path, None, CPU, {"cluster": "magic"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_minutes": "long"}, 'submitit refuses the options: Parameter "timeout_min" expected type'),
        ({"num_gpus": "one"}, 'submitit refuses the options: Parameter "gpus_per_node" expected type'),
        ({"runtime": 3}, "submitit refuses the options: Unknown argument 'runtime'"),
        ({"self": 3}, "submitit refuses the options: Unknown argument 'self'"),
    ],
)
def test_values_that_slurm_does_not_take(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        make_engine("slurm", tmp_path, None, CPU, {"cluster": "local", **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": "one"}, "num_gpus must be a number, 0 or more, got 'one'"),
        ({"num_gpus": True}, "num_gpus must be a number, 0 or more, got True"),
        ({"num_gpus": -1}, "num_gpus must be a number, 0 or more, got -1"),
        ({"num_gpus": float("nan")}, "num_gpus must be a number, 0 or more, got nan"),
        ({"address": 123}, "The address of a Ray cluster is host:port, auto or local, got 123"),
    ],
)
def test_values_that_ray_does_not_take(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        make_engine("ray", tmp_path, None, CPU, options)


def test_a_ray_cluster_of_another_version_is_one_sentence():
    class OtherVersion:
        def init(self, **options):
            raise RuntimeError(
                "Version mismatch: The cluster was started with:\n    Ray: 1.0\nThis process has:\n    2.0"
            )

    with pytest.raises(ValueError) as refused:
        _connect(OtherVersion(), "auto")
    assert str(refused.value) == (
        "The Ray cluster at auto cannot be used: Version mismatch: The cluster was started with: Ray: 1.0 "
        "This process has: 2.0"
    )


def test_without_slurm_the_engine_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="There is no Slurm here"):
        make_engine("slurm", tmp_path, None, CPU, {})


def fake_slurm(folder, monkeypatch, script):
    """An sbatch that does what the script says, and an srun, by which submitit knows a cluster."""
    folder.mkdir()
    for name, lines in (("sbatch", script), ("srun", "exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_no_number_of_time_limits_ends_a_run(tmp_path, monkeypatch):
    fake_slurm(tmp_path / "bin", monkeypatch, "exit 1")
    for options in ({}, {"cluster": "local"}):
        engine = make_engine("slurm", tmp_path / "out", None, CPU, options)
        assert engine._executor.cluster == options.get("cluster", "slurm")
        # submitit's executor puts this count into every job, and the job counts down.
        assert engine._executor._executor.max_num_timeout == 10**9


def test_a_job_that_sbatch_refuses_is_a_failed_run(tmp_path, monkeypatch):
    fake_slurm(tmp_path / "bin", monkeypatch, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    configs = grid(small_config(), seed=[0, 1])
    with pytest.raises(SweepFailed) as failed:
        run_sweep(configs, tmp_path / "out", engine="slurm", partition="gpu", display=Listener())
    refusal = "it could not be started: sbatch: error: invalid partition specified: gpu"
    assert failed.value.failures == {"seed=0": refusal, "seed=1": refusal}


@pytest.mark.slow
def test_slurm_with_submitits_local_executor(tmp_path):
    """The same results as with local processes; a run that fails is told apart from one that finishes."""
    configs = [*grid(small_config(), seed=[0, 1]), ("bad", small_config(learning_rate=1e30))]
    listener = Listener()
    rows = run_sweep(
        configs,
        tmp_path / "slurm",
        engine="slurm",
        device="cpu",
        cluster="local",
        display=listener,
        allow_failures=True,
    )
    here = run_sweep(configs, tmp_path / "local", device="cpu", threads=1, display=Listener(), allow_failures=True)
    assert [row["error"] is None for row in rows] == [row["error"] is None for row in here] == [True, True, False]
    assert "training stopped before the update" in rows[2]["error"]
    for one, other in zip(rows[:2], here[:2], strict=True):
        one, other = ({k: v for k, v in row.items() if k not in ("folder", "seconds")} for row in (one, other))
        assert one == other
    folder = tmp_path / "slurm" / "runs" / config_hash(configs[0][1])
    assert (folder / "metrics.jsonl").read_bytes() == (
        tmp_path / "local" / "runs" / folder.name / "metrics.jsonl"
    ).read_bytes()
    states = [state for name, state, _ in listener.events if name == "seed=0"]
    assert states[0] == "queued" and states[-1] == "finished"


@pytest.mark.slow
def test_a_preempted_slurm_job_is_requeued_and_goes_on(tmp_path):
    """submitit's own signal for preemption, sent to its local executor: the run is saved, requeued and resumed."""
    config = small_config(steps=1000, eval_every=0, checkpoint_every=0, log_every=50)
    engine = make_engine("slurm", tmp_path / "slurm", None, CPU, {"cluster": "local", "timeout_minutes": 60})
    run = plan({"a": config}, tmp_path / "slurm")[0]
    log = tmp_path / "slurm" / "logs" / f"{run.hash}.log"
    engine.start(run)
    try:
        wait_until(lambda: (run.folder / "timing.jsonl").is_file())
        controller = engine._at_work[0][1].job_id  # of the local executor: its process, with the job below it
        with open(f"/proc/{controller}/task/{controller}/children") as file:
            os.kill(int(file.read().split()[0]), signal.SIGUSR2)
        wait_until(lambda: "Training was stopped at step" in log.read_text())
        assert checkpoints(run), "it was saved although no checkpoint was due"
        wait_until(lambda: is_finished(run.folder, config))
    finally:
        engine.close()
    starts = [start["step"] for start in read_environments(run.folder)]
    assert len(starts) == 2 and 0 == starts[0] < starts[1]
    run_sweep({"a": config}, tmp_path / "local", device="cpu", threads=1, display=Listener())
    run_sweep({"a": config}, tmp_path / "slurm", device="cpu", threads=1, display=Listener())
    assert results_of(tmp_path / "slurm") == results_of(tmp_path / "local")


@pytest.mark.slow
def test_stopping_cancels_slurm_jobs(tmp_path):
    engine = make_engine("slurm", tmp_path, 1, CPU, {"cluster": "local"})
    run = plan({"a": small_config(steps=10**6, eval_every=0)}, tmp_path)[0]
    # As in a sweep: else jobs of a process that ignores SIGINT (one in the background of a shell) would ignore it too.
    with Interruption():
        engine.start(run)
    assert not engine.has_room()
    wait_until(lambda: checkpoints(run))
    engine.stop()
    wait_until(lambda: not is_in_use(run.folder))
    ended = []
    wait_until(lambda: ended.extend(engine.poll()) or ended)
    # submitit's local executor ends the job before it can answer, so what tells of the saved step is its log.
    assert ended[0][1].state == "lost" and "ended as INTERRUPTED" in ended[0][1].message
    assert "Training was stopped at step" in (tmp_path / "logs" / f"{run.hash}.log").read_text()


@pytest.mark.kills
def test_the_local_engine_leaves_nothing_behind(tmp_path):
    engine = LocalEngine(1, CPU)
    run = plan({"a": small_config(steps=10**6, eval_every=0)}, tmp_path)[0]
    engine.start(run)
    pid = engine._workers[0]._process.pid
    assert not engine.has_room() and json.loads(order_for(run, CPU, wait=True))["wait"] is True
    os.kill(pid, signal.SIGKILL)
    ended = []
    wait_until(lambda: ended.extend(engine.poll()) or ended)
    assert ended == [(run, ("lost", "its process was ended by SIGKILL"))] and engine.has_room()
    engine.close()
    assert not is_running(pid)
