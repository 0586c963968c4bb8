"""Pictures: everything a solver needs is in them, nothing that gives the answer away."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.patches import FancyBboxPatch, Polygon

from headcode.tasks import FuzzyLogic, SRaven, _glyphs, render

PUZZLE = SRaven().raw("iid", np.arange(3))["puzzles"][2]


def panels(figure, grid):
    return figure.axes[: grid * grid]


def things(axes):
    """Shapes of a panel without the pointer, which lies on top."""
    return [patch for patch in axes.patches if isinstance(patch, Polygon) and patch.get_zorder() < 5]


def test_each_panel_shows_its_number_colour_and_shape():
    from matplotlib.colors import to_hex

    figure = render.draw_puzzle(PUZZLE, show_answer=True)
    for k, axes in enumerate(panels(figure, 3)):
        shape, colour, number, _ = PUZZLE[k // 3, k % 3]
        drawn = things(axes)
        assert len(drawn) == number + 1
        assert {to_hex(patch.get_facecolor()) for patch in drawn} == {_glyphs.COLOURS[colour]}
        assert all(len(patch.get_xy()) - 1 == len(_glyphs.outline(shape)) for patch in drawn)
        assert len([patch for patch in axes.patches if patch.get_zorder() == 5]) == 1


def test_the_hidden_panel_shows_only_a_question_mark_and_no_number():
    figure = render.draw_puzzle(PUZZLE)
    hidden = panels(figure, 3)[-1]
    assert not things(hidden)
    assert [text.get_text() for text in hidden.texts] == ["?", "?  ?  ?  ?"]
    other = PUZZLE.copy()
    other[-1, -1] = (other[-1, -1] + 1) % 8
    assert texts(render.draw_puzzle(other)) == texts(figure)


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_eight_values_of_each_attribute_look_different():
    shapes = [_glyphs.outline(shape) for shape in range(8)]
    for a in range(8):
        for b in range(a):
            same = shapes[a].shape == shapes[b].shape and np.abs(shapes[a] - shapes[b]).max() < 0.2
            assert not same
    assert len(set(_glyphs.COLOURS)) == 8
    assert [len(places) for places in _glyphs.PLACES] == list(range(1, 9))


def test_things_stay_inside_the_frame_and_apart():
    for number, places in enumerate(_glyphs.PLACES):
        radius = 1.2 * _glyphs.SIZES[number] * _glyphs.STEP
        centres = 0.5 + _glyphs.STEP * np.array(places)
        assert centres.min() - radius > 0.06
        assert centres.max() + radius < 0.94
        gaps = np.linalg.norm(centres[:, None] - centres[None], axis=-1)[~np.eye(number + 1, dtype=bool)]
        assert number == 0 or gaps.min() > 1.9 * _glyphs.SIZES[number] * _glyphs.STEP


@pytest.mark.parametrize("options", [{"num_features": 2}, {"num_features": 5, "num_values": 11, "grid": 4}])
def test_other_sizes_have_a_picture(options):
    task = SRaven(**options)
    puzzle = task.raw("iid", np.arange(1))["puzzles"][0]
    figure = render.draw_puzzle(puzzle, task.num_values)
    assert len(panels(figure, task.grid)) == task.grid**2
    if task.num_values > 8:
        first = [text.get_text() for text in figure.axes[0].texts]
        assert first == [str(value) for value in puzzle[0, 0]]
    assert any(isinstance(patch, FancyBboxPatch) for patch in figure.axes[0].patches)


def test_files_are_real_pictures_and_reproducible(tmp_path):
    for name in ("a.png", "a.svg", "b.svg"):
        render.save(render.draw_puzzle(PUZZLE, title="puzzle"), tmp_path / "deep" / name)
    assert (tmp_path / "deep" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "deep" / "a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "deep" / "a.svg").read_bytes() == (tmp_path / "deep" / "b.svg").read_bytes()
    assert not [path for path in (tmp_path / "deep").iterdir() if path.name.startswith(".")]
    with pytest.raises(ValueError, match="ends in .png or .svg"):
        render.save(render.draw_puzzle(PUZZLE), tmp_path / "a.gif")


def test_a_functions_surface_has_its_values():
    terms = np.array([[1, 0, 1], [0, 0, 1]])
    figure = render.draw_function(terms)
    surface = figure.axes[0].collections[0]
    assert figure.axes[0].get_xlabel() == "x1"  # the terms differ in x1; x2 is the next
    assert figure.axes[0].get_ylabel() == "x2"
    assert surface.get_array().max() > 0.9
    assert "x3 = 1" in figure.axes[0].get_title()
    batch = FuzzyLogic(num_points=9).sample("iid", 0, 1)
    points = np.concatenate([batch.x[0, :, :-1], batch.info["targets"][0, :, None]], axis=1)
    drawn = render.draw_function(batch.info["terms"][0].numpy(), variables=(0, 3), points=points)
    shown = drawn.axes[1].collections[0]
    assert shown.get_offsets().tolist() == points[:-1, [0, 3]].tolist()
    np.testing.assert_array_equal(shown.get_array(), points[:-1, -1])


@pytest.mark.parametrize("variables", [(0, 0), (0, 3), (-1, 1)])
def test_a_function_is_drawn_over_two_of_its_variables(variables):
    with pytest.raises(ValueError, match="two different variables out of 0..2"):
        render.draw_function(np.array([[1, 0, 1]]), variables)


def test_a_function_of_one_variable_has_no_surface():
    with pytest.raises(ValueError, match="two different variables"):
        render.draw_function(np.array([[1]]))


def test_a_puzzle_in_the_terminal_is_a_grid_with_its_answer_hidden():
    puzzle = np.array([[[3, 11], [5, 4]], [[7, 2], [99, 98]]])
    expected = ["┌───────┬───────┐", "│  3 11 │  5  4 │", "├───────┼───────┤", "│  7  2 │  ?  ? │", "└───────┴───────┘"]
    assert render.puzzle_text(puzzle).splitlines() == expected
    assert "99 98" in render.puzzle_text(puzzle, show_answer=True)
    coloured = render.puzzle_text(puzzle, colour=True)
    assert "\x1b[1;" in coloured
    points = np.array([[0.5, 0.25, 0.5], [0.125, 1.0, 0.0]])
    lines = render.function_text(np.array([[1, 0]]), points).splitlines()
    assert lines[1:] == ["0.500  0.250  0.500", "0.125  1.000      ?"]
    shown = render.function_text(np.array([[1, 0]]), points, show_answer=True, target=0.75)
    assert shown.splitlines()[-2:] == ["0.125  1.000  0.750", "f = (x1 ∧ ¬x2)"]


def test_bad_puzzles_are_refused():
    with pytest.raises(ValueError, match="square grid"):
        render.draw_puzzle(np.zeros((3, 2, 4), dtype=int))
