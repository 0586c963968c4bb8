"""Maps are made from the codes with stored settings; likeness and the view along training give known answers."""

import sys

import numpy as np
import pytest

from headcode.analysis import (
    along_training,
    capture,
    checkpoints_of,
    codes_of,
    likeness,
    make_map,
    open_arrays,
    open_run,
)
from headcode.analysis.files import write_arrays


@pytest.fixture
def codes(make_run, tmp_path):
    return capture(open_run(make_run("sraven")), "compositional", tmp_path / "codes.npz", size=40)


def test_pca_is_the_principal_plane(codes, tmp_path):
    read = open_arrays(make_map(codes, tmp_path / "m.npz", layer=1, method="pca"))
    features = codes_of(codes, 1, 17).astype(float)
    standardised = (features - features.mean(0)) / features.std(0)
    strengths = np.linalg.svd(standardised)[1]
    np.testing.assert_allclose(np.linalg.norm(read["points"], axis=0), strengths[:2], rtol=1e-3)
    np.testing.assert_array_equal(read["rule"], codes["token_rules"][:, 17])
    np.testing.assert_array_equal(read["target"], codes["targets"][:, 1])
    assert read.card["settings"]["explained_variance"][0] == pytest.approx((strengths**2 / (strengths**2).sum())[0])


def test_tsne_keeps_its_seed(codes, tmp_path):
    first, again, other = (
        open_arrays(make_map(codes, tmp_path / f"m{i}.npz", layer=1, size=30, seed=seed))
        for i, seed in enumerate((3, 3, 4))
    )
    np.testing.assert_array_equal(first["points"], again["points"])
    assert first["points"].shape == (30, 2) and first.card["map_seed"] == 3
    assert first.card["settings"]["perplexity"] == pytest.approx(29 / 3)
    assert other.card["settings"]["random_state"] == 4


def test_maps_say_what_is_wrong(codes, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="tsne, pca, umap"):
        make_map(codes, tmp_path / "m.npz", layer=1, method="lda")
    with pytest.raises(ValueError, match="all the same"):
        make_map(codes, tmp_path / "m.npz", layer=0)  # a hidden token's first code to itself knows only its place
    with pytest.raises(ValueError, match="nothing to compare"):
        likeness(codes, codes, tmp_path / "l.npz", layer=0)
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(ModuleNotFoundError, match=r"headcode\[umap\]"):
        make_map(codes, tmp_path / "m.npz", layer=1, method="umap")


def test_equal_codes_are_refused_whatever_rounding_makes_of_their_mean(codes, tmp_path):
    """t-SNE divides by their spread, and its compiled part crashes on what comes out."""
    size = len(codes["correct"])
    arrays = {name: np.asarray(codes[name]) for name in codes}
    arrays = {name: np.concatenate([a] * 10) if len(a) == size else a for name, a in arrays.items()}
    equal = np.full_like(arrays["codes_layer_1"], 2.1279168)
    assert equal.std(0).max() > 1e-6 * equal.max(), "the mean of equal numbers is rounded"
    path = write_arrays(tmp_path / "equal.npz", arrays | {"codes_layer_1": equal}, codes.card)
    with pytest.raises(ValueError, match="are all the same: there is nothing to map"):
        make_map(open_arrays(path), tmp_path / "m.npz", layer=1)


def test_likeness_of_a_split_with_itself(codes, tmp_path):
    read = open_arrays(likeness(codes, codes, tmp_path / "l.npz", layer=1))
    cosine = np.asarray(read["cosine"])
    occurs = ~np.isnan(np.diag(cosine))
    np.testing.assert_allclose(np.diag(cosine)[occurs], 1, rtol=1e-6)
    assert read.card["diagonal_share"] == 1.0 and read.card["classes_compared"] == occurs.sum() > 2


def test_along_training(make_run, tmp_path):
    path = make_run("sraven", checkpoint_every=1)
    assert checkpoints_of(path) == ["untrained", "step-2", "step-3"]
    result = along_training(path, tmp_path, size=60)
    assert [row["step"] for row in result["rows"]] == [0, 2, 3]
    read = open_arrays(tmp_path / "training.npz")
    assert read["means"].shape == (3, 8, 2) and read.card["rows"] == result["rows"]
    assert [p.name for p in tmp_path.iterdir()] == ["training.npz"]
    with pytest.raises(ValueError, match="layers 0 to 1; got \\[7\\]"):
        along_training(path, tmp_path, layer=7)
    with pytest.raises(ValueError, match="cannot be tested on it"):
        along_training(path, tmp_path, split="iid")
