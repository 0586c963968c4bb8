"""The lens: a pretrained transformer's attention read as a hypernetwork.

In every layer the attention weights of a (query, key) pair across the heads are its code, and the code configures a
value network for that pair. The lens checks that these networks add up to what the model itself computed, and asks what
their codes separate.

    reading = read_model("all-minilm-folder", "The cat sat on the mat.")      one text, all of it
    reading.layers[0].codes                            (H, query, key)
    reading.layers[0].value_network(3, 5)              W[3, 5], (dim, dim)
    reading.layers[0].error                            distance to the model's own output
    result = study_model("all-minilm-folder", text)    many sentences: what `headcode lens` makes its page of

Models are opened and run by `models` (`pretrained_models`, `own_models`); `layer` is the mathematics of one layer;
`reading` and `study` are what users call. A study goes: `questions` (with `sentences`) → `collect` → `separation`,
`neighbours`, `patching`.
"""

from headcode.analysis.lens.layer import TOLERANCE, LayerReading, contributions, reproduce, summarise
from headcode.analysis.lens.models import LensModel, open_model
from headcode.analysis.lens.reading import Reading, read_model, write_networks, write_reading
from headcode.analysis.lens.study import study_model

__all__ = [
    "TOLERANCE",
    "LayerReading",
    "LensModel",
    "Reading",
    "contributions",
    "open_model",
    "read_model",
    "reproduce",
    "study_model",
    "summarise",
    "write_networks",
    "write_reading",
]
