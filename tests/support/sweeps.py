"""Small runs for sweeps, and what two sweeps must have in common to count as the same."""

import shutil

from headcode.sweep.display import SilentDisplay
from headcode.sweep.process import Outcome
from headcode.sweep.status import is_finished
from headcode.train import Runtime, Trainer
from tests.support import training

SIZES = training.SIZES | {"num_layers": 1, "eval_every": 15}


def small_config(**changes):
    return training.small_config(**(SIZES | changes))


_trained = {}


def train_here(run):
    """What a worker does, in this process; a run that was trained before is copied."""
    if run.hash not in _trained or not _trained[run.hash].is_dir() or _trained[run.hash] == run.folder:
        Trainer(run.config, run.folder, runtime=Runtime(device="cpu", threads=1)).run()
        _trained[run.hash] = run.folder
    elif not is_finished(run.folder, run.config):
        shutil.copytree(_trained[run.hash], run.folder, dirs_exist_ok=True)
    return Outcome("finished")


class ScriptedEngine:
    """Trains in this process, except where the script has another outcome for a run's next attempts."""

    queues = False

    def __init__(self, script=None, room=1):
        self.script = {name: list(outcomes) for name, outcomes in (script or {}).items()}
        self.room = room
        self.started = []
        self.closed = False
        self._at_work = []

    def has_room(self):
        return len(self._at_work) < self.room

    def start(self, run):
        self.started.append(run.name)
        self._at_work.append(run)

    def poll(self):
        ended, self._at_work = self._at_work, []
        return [(run, self._end(run)) for run in ended]

    def _end(self, run):
        planned = self.script.get(run.name)
        return planned.pop(0) if planned else train_here(run)

    def stop(self):
        self._at_work = []

    def close(self):
        self.closed = True


class Listener(SilentDisplay):
    """Remembers what it was told."""

    def __init__(self):
        self.events = []

    def event(self, state, words):
        self.events.append((state.run.name, state.state, words))

    def say(self, words):
        self.events.append(("", "", words))


def results_of(out):
    """What a sweep leaves behind, as bytes: the records and last weights of every run, and all rows but their times."""
    found = {}
    for run in sorted((out / "runs").iterdir()):
        last = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
        found[run.name] = [(run / "metrics.jsonl").read_bytes(), last.name, (last / "model.safetensors").read_bytes()]
    rows = [line.rsplit(",", 1)[0] for line in (out / "results.csv").read_text().splitlines()]  # the last is seconds
    return found, rows
