"""Sweeps: many runs by one command, none of them lost, none trained twice.

from headcode.presets import preset
from headcode.sweep import grid, run_sweep

rows = run_sweep(grid(preset("logic-small"), method=["softmax", "hyla"], seed=range(3)), out="sweeps/first", jobs=2)
"""

from headcode.sweep.display import Display, SilentDisplay
from headcode.sweep.grid import grid, zipped
from headcode.sweep.plan import config_hash
from headcode.sweep.runner import SweepFailed, SweepInterrupted, run_sweep

__all__ = [
    "Display",
    "SilentDisplay",
    "SweepFailed",
    "SweepInterrupted",
    "config_hash",
    "grid",
    "run_sweep",
    "zipped",
]
