"""Names and configurations: grids, zipped values, hashes, plans, sweep files."""

import dataclasses
import itertools

import pytest

from headcode.presets import RunConfig, get_field, override, preset
from headcode.sweep import config_hash, grid, zipped
from headcode.sweep.file import read_sweep
from headcode.sweep.plan import plan
from tests.support.sweeps import small_config


def test_grid_is_the_product_in_order():
    base = preset("logic")
    pairs = list(grid(base, num_points=[16, 32], seed=range(3)))
    expected = list(itertools.product([16, 32], range(3)))
    assert [(get_field(c, "num_points"), c.seed) for _, c in pairs] == expected
    assert [name for name, _ in pairs] == [f"num_points={n},seed={s}" for n, s in expected]
    assert pairs[0][1].model.max_length == 16 and pairs[2][1].task.seed == 2
    assert all(
        config == override(base, num_points=n, seed=s) for (_, config), (n, s) in zip(pairs, expected, strict=True)
    )


def test_zipped_takes_values_together():
    pairs = list(zipped(preset("sraven"), num_heads=[16, 32], dim=(128, 256)))
    assert [(name, c.model.num_heads, c.model.dim) for name, c in pairs] == [
        ("num_heads=16,dim=128", 16, 128),
        ("num_heads=32,dim=256", 32, 256),
    ]


def test_names_of_every_kind_of_value():
    def names(**values):
        return [name for name, _ in grid(preset("sraven"), **values)]

    assert names(learning_rate=[3e-4, 1]) == ["learning_rate=0.0003", "learning_rate=1"]
    assert names(weight_decay=[1, 0.5]) == ["weight_decay=1", "weight_decay=0.5"]
    assert names(clip_norm=[None, 1.0]) == ["clip_norm=null", "clip_norm=1"]
    assert names(permute=[True, False]) == ["permute=true", "permute=false"]
    assert names(aligned=[((0, 1), (1000, 0))]) == ["aligned=[[0,1],[1000,0]]"]


@pytest.mark.parametrize(
    ("make", "values", "words"),
    [
        (grid, {}, "at least one field"),
        (grid, {"metod": ["hyla"]}, "no field 'metod'; did you mean 'method'\\? It has: accumulate"),
        (grid, {"method": "hyla"}, r"method needs a list of values, for example method=\['hyla'\]"),
        (grid, {"seed": 3}, "seed needs a list"),
        (grid, {"seed": []}, "seed has no values"),
        (zipped, {"seed": [1, 2], "dim": [16]}, "seed has 2, dim has 1"),
    ],
)
def test_mistakes_are_found_before_the_first_run(make, values, words):
    with pytest.raises(ValueError, match=words):
        make(preset("logic"), **values)


def test_hash_depends_on_every_field_and_on_nothing_else():
    base = small_config()
    changed = [
        {"seed": 1},
        {"task_seed": 1},
        {"method": "softmax"},
        {"learning_rate": 0.002},
        {"held_out": 0.5},
        {"steps": 31},
        {"eval_size": 24},
    ]
    hashes = [config_hash(base), *(config_hash(override(base, **change)) for change in changed)]
    assert len(set(hashes)) == len(hashes)
    assert config_hash(RunConfig.from_json(base.to_json())) == hashes[0]
    assert config_hash(override(base, learning_rate=1)) == config_hash(override(base, learning_rate=1.0))
    assert all(len(h) == 12 and int(h, 16) >= 0 for h in hashes)


def test_hash_is_the_same_in_every_version():
    # Folders on disk are named by it. A number that changes here makes finished runs start over.
    assert config_hash(preset("logic")) == LOGIC_HASH
    assert config_hash(preset("sraven")) == SRAVEN_HASH


LOGIC_HASH, SRAVEN_HASH = "b1ebd09a392c", "6a9c092019a9"


def test_hash_survives_a_field_that_a_later_version_adds():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class LaterConfig(RunConfig):
        something_new: int = 7

    now = small_config()
    fields = {field.name: getattr(now, field.name) for field in dataclasses.fields(now)}
    assert config_hash(LaterConfig(**fields)) == config_hash(now)
    assert config_hash(LaterConfig(**fields, something_new=8)) != config_hash(now)


def test_plan_trains_equal_configurations_once(tmp_path):
    runs = plan([("a", small_config()), ("b", small_config(seed=1)), ("c", small_config(seed=0))], tmp_path)
    assert [run.names for run in runs] == [["a", "c"], ["b"]]
    assert runs[0].folder == tmp_path / "runs" / config_hash(small_config())
    assert [run.names for run in plan({"a": small_config()}, tmp_path)] == [["a"]]
    assert [run.names for run in plan([("a", small_config())] * 2, tmp_path)] == [["a"]]


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([("a", small_config()), ("a", small_config(seed=1))], "Two different configurations are called 'a'"),
        ([], "no runs"),
        ([small_config()], "pairs, got RunConfig"),
        ([("a", {"steps": 3})], "'a' must be a RunConfig, got dict"),
        ([("", small_config())], "name is one line"),
        ([("a\nb", small_config())], "name is one line"),
        ([(3, small_config())], "name is one line"),
        (small_config(), "got RunConfig"),
        ("abc", "got str"),
    ],
)
def test_plans_that_are_refused(configs, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        plan(configs, tmp_path)


GOOD = """
from headcode.presets import preset
from headcode.sweep import grid

def sweep():
    yield from grid(preset("logic-small"), method=["softmax", "hyla"])
    yield "long", preset("logic")
"""


def test_a_sweep_file(tmp_path):
    (tmp_path / "good.py").write_text(GOOD)
    found = read_sweep(tmp_path / "good.py")
    assert [name for name, _ in found] == ["method=softmax", "method=hyla", "long"]
    assert found[1][1] == override(preset("logic-small"), method="hyla")
    (tmp_path / "mapping.py").write_text(GOOD.split("def")[0] + "def sweep():\n    return {'one': preset('logic')}\n")
    assert read_sweep(tmp_path / "mapping.py") == [("one", preset("logic"))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def sweep(:\n", "line 1: "),
        ("x = 3\n", r"needs a function sweep\(\)"),
        ("sweep = 3\n", r"needs a function sweep\(\)"),
        ("import nothing_of_this_name\n", "line 1: ModuleNotFoundError: No module named"),
        ("def sweep():\n    return []\n", "yields no runs"),
        ("def sweep():\n    pass\n", "pairs, got NoneType"),
        ("def sweep():\n    yield 'a'\n", "pairs, got str"),
        ("def sweep():\n    yield 'a', 3\n", "must be a RunConfig, got int"),
        ("def sweep():\n    yield 'a', 1 / 0\n", "line 2: ZeroDivisionError"),
        ("def sweep(x):\n    yield 'a', 1\n", "TypeError"),
        (
            "from headcode.presets import *\nfrom headcode.sweep import *\ndef sweep():\n"
            "    return grid(preset('logic'), metod=['hyla'])\n",
            "line 4: A logic run has no field 'metod'",
        ),
    ],
)
def test_bad_sweep_files(tmp_path, text, words):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_sweep(tmp_path / "bad.py")
    with pytest.raises(ValueError, match="there is no such file"):
        read_sweep(tmp_path / "missing.py")
    with pytest.raises(ValueError, match="is a folder, not a sweep file; give a Python file"):
        read_sweep(tmp_path)
