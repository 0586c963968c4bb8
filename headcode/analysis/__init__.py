"""Reading the codes: captured to files, decoded, mapped, intervened on, and the lens on pretrained models.

from headcode.analysis import capture, decode, open_run, patch, read_model

codes = capture(open_run("runs/first"), "compositional", "codes.npz", size=50_000)
result = decode("runs/first")                     macro F1 per layer, with controls
rows = patch("runs/first")                        whom the answer follows
reading = read_model("folder-or-hub-name", "Some text.")
"""

from headcode.analysis.ablate import ablate, ablate_directions, class_directions, heads_against_generalisation
from headcode.analysis.authors import as_authors
from headcode.analysis.codes import capture, choose_pairs, codes_of
from headcode.analysis.decode import Decoder, Examples, Score, decode, examples, score, write_csv, write_decoding
from headcode.analysis.files import Arrays, open_arrays
from headcode.analysis.kinds import cluster_by_kind, token_kinds
from headcode.analysis.lens import LayerReading, Reading, open_model, read_model, study_model, summarise
from headcode.analysis.maps import along_training, likeness, make_map
from headcode.analysis.patch import patch
from headcode.analysis.runs import OpenRun, checkpoints_of, open_run

__all__ = [
    "Arrays",
    "Decoder",
    "Examples",
    "LayerReading",
    "OpenRun",
    "Reading",
    "Score",
    "ablate",
    "ablate_directions",
    "along_training",
    "as_authors",
    "capture",
    "checkpoints_of",
    "choose_pairs",
    "class_directions",
    "cluster_by_kind",
    "codes_of",
    "decode",
    "examples",
    "heads_against_generalisation",
    "likeness",
    "make_map",
    "open_arrays",
    "open_model",
    "open_run",
    "patch",
    "read_model",
    "score",
    "study_model",
    "summarise",
    "token_kinds",
    "write_csv",
    "write_decoding",
]
