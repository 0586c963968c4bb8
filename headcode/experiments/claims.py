"""What the paper claims, figure by figure and table by table, and the experiment or the place that answers each claim.

Numbers of the paper are cited as reported. A claim that an experiment decides takes its verdict from that experiment's
last findings: from the statements in which one of its `tests` is found, or from all of them.
"""

from headcode.experiments._claim import Claim
from headcode.experiments._table_a1 import TABLE_A1


def _logic(one: str, other: str) -> str:
    return _against(TABLE_A1[one].logic, TABLE_A1[other].logic)


def _sraven(one: str, other: str) -> str:
    return _against(TABLE_A1[one].sraven, TABLE_A1[other].sraven)


def _against(one: tuple[float, float], other: tuple[float, float]) -> str:
    return f"{one[0]:.3f} ± {one[1]:.3f} against {other[0]:.3f} ± {other[1]:.3f}"


UNTRAINED, SHUFFLED = r"better than an untrained network's\.$", r"better than shuffled labels\.$"
LOGIC, SRAVEN = "Table A1, fuzzy logic", "Table A1, SRAVEN"

CLAIMS = (
    Claim(
        "Eq. 2–5",
        "attention is a hypernetwork: each pair's code generates a linear value network; exact, also for "
        "cross-attention",
        ours="the generated networks, applied to their tokens and summed, give the layer's output to 1e-9 in float64",
        word="supports",
        page="idea.md",
        command="pytest tests/nn/test_hypernetwork.py",
    ),
    Claim(
        "Eq. 6–7, 10",
        "HYLA: codes normalised across heads generate a value network with a hidden layer and a nonlinearity (Eq. 10: "
        "one layer more)",
        ours="the layers of Eq. 2–7 agree with the authors' code to 1e-9 in float64",
        word="definition",
        page="deviations.md",
        command="pytest tests/interop",
    ),
    Claim(
        "Fig. 2B",
        "fuzzy logic: codes tell the terms of functions whose combination was never seen (our test: decoders do better "
        "than those fitted to shuffled labels)",
        "logic-codes",
        (SHUFFLED,),
    ),
    Claim("Fig. 2B", "… and better than from an untrained network's codes (our test)", "logic-codes", (UNTRAINED,)),
    Claim(
        "Fig. 2B",
        "… and decoders carry over to them (our bound: at least 80 % of their F1 on seen combinations)",
        "logic-codes",
        (r"at least 80 % as well as on seen\.$",),
    ),
    Claim(
        "Fig. 2C",
        "fuzzy logic: HYLA generalises better to held-out combinations of terms than linear attention",
        "logic-generalisation",
        ("HYLA is ahead of linear",),
    ),
    Claim("Fig. 2C", "… and than softmax attention", "logic-generalisation", ("HYLA is ahead of softmax",)),
    Claim(
        "Fig. 2C",
        "… and declines less than linear attention when more is held out or contexts are shorter",
        "logic-generalisation",
        ("HYLA declines less than linear",),
    ),
    Claim("Fig. 2C", "… and than softmax attention", "logic-generalisation", ("HYLA declines less than softmax",)),
    Claim(
        "Fig. 2D, A2",
        "fuzzy logic: t-SNE of the codes shows terms, functions and targets in groups",
        "logic-codes",
        ours="a map of the last layer's codes for each method, coloured by term; a picture, no test",
        word="not tested",
    ),
    Claim(
        "Fig. A3",
        "fuzzy logic: no model solves functions of terms that training never had",
        "logic-ablation",
        ("No model solves",),
    ),
    Claim(
        "Fig. 3",
        "SRAVEN: puzzles whose columns hide, each by its own permutation, which feature is which",
        ours="the task, with an exact solver",
        word="definition",
        page="tasks.md",
        command="headcode puzzle --answer",
    ),
    Claim("Fig. 4", "SRAVEN: held-out accuracy grows with data", "sraven-scaling", ("second half", "instances")),
    Claim("Fig. 4", "… with width", "sraven-scaling", (": width",)),
    Claim("Fig. 4", "… and with depth", "sraven-scaling", (": depth",)),
    Claim(
        "Fig. 4",
        "… all three methods come to about 0.80 with enough of them (a question for paper scale)",
        "sraven-scaling",
        (r"comes to about 0\.80",),
    ),
    Claim(
        "Fig. 4",
        "… and HYLA's lead is largest with little data and small models",
        "sraven-scaling",
        ("HYLA's lead over",),
    ),
    Claim(
        "Fig. 5A/B, A6, A7",
        "SRAVEN: t-SNE of the codes shows the rules in late layers, the magnitude of the answer in early ones",
        "sraven-codes",
        ours="a map of the last layer's codes for each method, coloured by rule; a picture, no test",
        word="not tested",
    ),
    Claim(
        "Fig. 5C", "SRAVEN: one head is clearly worse than several, HYLA", "sraven-heads", ("hyla: .* heads compose",)
    ),
    Claim("Fig. 5C", "… softmax attention", "sraven-heads", ("softmax: .* heads compose",)),
    Claim("Fig. 5D", "SRAVEN: the more features, the harder the puzzles", "sraven-features", ("are harder than",)),
    Claim("Fig. 5E, A8", "SRAVEN: sum and difference share a code", "sraven-codes", ("more alike",)),
    Claim(
        "Fig. 5F",
        "SRAVEN: codes tell the rules of held-out combinations (our test: better than shuffled labels)",
        "sraven-codes",
        (SHUFFLED,),
    ),
    Claim("Fig. 5F", "… and better than from an untrained network's codes (our test)", "sraven-codes", (UNTRAINED,)),
    Claim(
        "Fig. 5F",
        "… best in late layers (our test: the last one is better than the first)",
        "sraven-codes",
        (r"those of the first\.$",),
    ),
    Claim("Fig. 5F", "… the same, with codes taken as the authors do", "sraven-codes", (r"network's \(", r"first \(")),
    Claim(
        "Fig. 6",
        "language (C4, 50 M parameters, 130 B tokens): HYLA is ahead of linear attention",
        "language",
        (r"HYLA is ahead of linear \(",),
    ),
    Claim("Fig. 6", "… and softmax attention is best, HYLA close behind it", "language", ("Softmax is ahead of HYLA",)),
    Claim(
        "Fig. A4",
        "SRAVEN: the training loss of the three methods",
        "sraven-scaling",
        ours="curves, drawn by the command; a picture, no test",
        word="not tested",
    ),
    Claim(
        "Fig. A5",
        "SRAVEN: accuracy with 0.1 to 0.9 of the combinations held out (no claim in numbers that we know of): it falls",
        "sraven-held-out",
        ("it composes better with",),
        kind="no claim",
    ),
    Claim(
        LOGIC,
        f"HYLA is ahead of softmax attention: {_logic('hyla', 'softmax')}",
        "logic-ablation",
        ("HYLA is ahead of softmax",),
    ),
    Claim(
        LOGIC,
        f"HYLA is ahead of linear attention: {_logic('hyla', 'linear')}",
        "logic-ablation",
        ("HYLA is ahead of linear",),
    ),
    Claim(
        LOGIC,
        "no claim of the paper, whose errors are larger than the difference: softmax ahead of linear, "
        f"{_logic('softmax', 'linear')}",
        "logic-ablation",
        ("Softmax attention is ahead of linear",),
        kind="no claim",
    ),
    Claim(
        LOGIC,
        f"the norm across heads helps linear attention: {_logic('linear_rms', 'linear')}",
        "logic-ablation",
        ("norm across heads helps linear",),
    ),
    Claim(
        LOGIC,
        f"… and makes no difference to HYLA: {_logic('hyla', 'hyla_unnormed')} without",
        "logic-ablation",
        ("norm across heads helps HYLA",),
        kind="no difference",
    ),
    Claim(
        LOGIC,
        f"the nonlinearity gives nothing beyond the second layer: {_logic('hyla', 'hyla_deep_linear')} without",
        "logic-ablation",
        ("nonlinearity helps beyond",),
        kind="no difference",
    ),
    Claim(
        LOGIC,
        f"a deeper generated network gives no more than the errors: {_logic('hyla_deeper', 'hyla')}",
        "logic-ablation",
        ("deeper generated network",),
        kind="no difference",
    ),
    Claim(
        LOGIC,
        f"… nor does a mixture of experts: softmax {_logic('softmax_experts', 'softmax')}, linear "
        f"{_logic('linear_experts', 'linear')}, HYLA {_logic('hyla_experts', 'hyla')}",
        "logic-ablation",
        ("mixture of experts",),
        kind="no difference",
    ),
    Claim(
        SRAVEN,
        f"HYLA is ahead of softmax attention: {_sraven('hyla', 'softmax')}",
        "sraven-ablation",
        ("HYLA is ahead of softmax",),
    ),
    Claim(
        SRAVEN,
        f"HYLA is ahead of linear attention: {_sraven('hyla', 'linear')}",
        "sraven-ablation",
        ("HYLA is ahead of linear",),
    ),
    Claim(
        SRAVEN,
        f"the norm across heads helps HYLA: {_sraven('hyla', 'hyla_unnormed')} without",
        "sraven-ablation",
        ("norm across heads helps HYLA",),
    ),
    Claim(
        SRAVEN,
        f"the nonlinearity helps beyond the second layer: {_sraven('hyla', 'hyla_deep_linear')} without",
        "sraven-ablation",
        ("nonlinearity helps beyond",),
    ),
    Claim(
        SRAVEN,
        f"a nonlinear value network hurts softmax attention: {_sraven('softmax_hyla', 'softmax')} with a linear one",
        "sraven-ablation",
        ("nonlinear value network helps softmax",),
        kind="opposite",
    ),
    Claim(
        SRAVEN,
        f"a deeper generated network gives no more than the errors: {_sraven('hyla_deeper', 'hyla')}",
        "sraven-ablation",
        ("deeper generated network",),
        kind="no difference",
    ),
    Claim(
        SRAVEN,
        f"a mixture of experts helps linear attention: {_sraven('linear_experts', 'linear')}",
        "sraven-ablation",
        ("mixture of experts helps linear",),
    ),
    Claim(
        SRAVEN,
        f"… and makes no difference to softmax ({_sraven('softmax_experts', 'softmax')}) and HYLA "
        f"({_sraven('hyla_experts', 'hyla')})",
        "sraven-ablation",
        ("mixture of experts helps (softmax|HYLA)",),
        kind="no difference",
    ),
    Claim(
        "Table A3",
        "sizes and hyperparameters of fuzzy logic, SRAVEN and C4",
        ours="presets with the paper's sizes; what differs, and what the paper leaves open, is listed",
        word="settings",
        page="deviations.md",
        command="headcode reproduce logic-generalisation --scale paper --dry-run",
    ),
    Claim("B.2", "fewer than 0.5 % of the puzzles are ambiguous", "ambiguity", ("By the authors' check",)),
    Claim("B.2", "… if every rival answer counts (our definition)", "ambiguity", ("By the exact solver",)),
    Claim(
        "Compute",
        "two to three minutes a run (fuzzy logic, RTX 3090), 20 to 200 minutes (SRAVEN), 72 to 100 hours on 16 TPU v5e "
        "(C4)",
        ours="the paper's scale is counted and timed on your machine before it starts",
        word="not tested",
        page="bench-train.md",
        command="headcode reproduce sraven-scaling --scale paper --dry-run",
    ),
    Claim(
        "Discussion",
        "a value network for each query, its keys pooled inside, in place of one for each pair",
        ours="an open question",
        word="not tested",
        page="idea.md",
    ),
    Claim(
        "Discussion",
        "in a graph network the message function is the hypernetwork, and aggregation a choice (our test: HYLA "
        "composes held-out pairs of relations better than softmax attention, GATv2Conv and the other methods)",
        "graph-composition",
        (r"^HYLA composes held-out pairs better than .*, both",),
        kind="no claim",
    ),
    Claim(
        "Discussion",
        "scale helps composition, as semantic parsing shows",
        ours="semantic parsing at one size alone (SCAN); scale on SRAVEN is Fig. 4",
        word="not tested",
        page="results/sraven-scaling.md",
    ),
    Claim(
        "Discussion",
        "whether the codes of pretrained models are structured is open",
        ours="one small sentence encoder (all-MiniLM): its codes tell position, kinds of words and syntactic relations "
        "better than shuffled heads, untrained weights and shuffled labels in 34 of 42 tests",
        word="holds here",
        page="results/lens.md",
        command="headcode lens MODEL --text FILE",
    ),
    Claim(
        "Starting point",
        "attention can optimise in context: one layer of linear attention can take a gradient step (von Oswald et al., "
        "2023)",
        "in-context",
        ("exactly one gradient step",),
    ),
    Claim("Starting point", "… and training finds it", "in-context", ("like one tuned gradient step",)),
    Claim(
        "Reviewers",
        "is it composition, or only capacity? HYLA composes better at equal parameters and FLOPs",
        "capacity",
        ("At equal",),
        kind="no claim",
    ),
    Claim(
        "Reviewers",
        "… than softmax attention at equal training loss",
        "capacity",
        ("At training loss .* softmax",),
        kind="no claim",
    ),
    Claim(
        "Reviewers",
        "… than linear attention at equal training loss",
        "capacity",
        ("At training loss .* linear",),
        kind="no claim",
    ),
    Claim(
        "Reviewers",
        "cross-attention: puzzle and answer as two sequences serve better than one",
        "cross-attention",
        ("two sequences than with one",),
        kind="no claim",
    ),
    Claim(
        "Ours",
        "fuzzy logic: a code of several numbers is better than one (the paper shows it on SRAVEN)",
        "heads",
        kind="no claim",
    ),
    Claim(
        "Ours",
        "fuzzy logic: HYLA's norm and nonlinearity are the best of 35 pairs",
        "logic-grid",
        ("best cell",),
        kind="no claim",
    ),
    Claim(
        "Ours",
        "SRAVEN: each part of our fast recipe helps",
        "sraven-recipe",
        ("The recipe is ahead",),
        kind="no claim",
    ),
    Claim("Ours", "SCAN (not in the paper): HYLA is ahead of softmax and linear", "scan", ("ahead",), kind="no claim"),
)
