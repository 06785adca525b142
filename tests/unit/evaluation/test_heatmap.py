"""Success by length and depth: cells where they belong, and no picture of results that do not belong together."""

import dataclasses

import pytest
from matplotlib.axes import Axes
from result_maker import made_result

from ctxext.evals.passkey import PasskeyRetrieval
from ctxext.evals.retrieval import Retrieval
from ctxext.evaluation.base import Plan, Unit
from ctxext.evaluation.heatmap import depth_profile, draw_length_by_depth


def passkey(length, k, hits, **changes):
    evaluation = PasskeyRetrieval(length=length, depths=len(k), trials=2)
    scored = [{"k": one, "hits": hit, "tried": 2, "keys": [], "answers": []} for one, hit in zip(k, hits, strict=True)]
    plots = [dataclasses.asdict(plot) for plot in evaluation.summarize(Plan(units=[]), scored).plots]
    values = {"protocol_id": evaluation.protocol_id(), "options": {"length": length}, "plots": plots}
    return made_result(**{**values, **changes})


def test_distances_from_the_end_become_depths():
    # at distance 50 of 200 tokens, three quarters have been read
    assert depth_profile(passkey(200, [50, 180], [1, 2])) == (200, pytest.approx([10.0, 75.0]), [1.0, 0.5])


def test_a_result_of_retrieval():
    evaluation = Retrieval(variant="digits", length=300, depths=2, trials=1)
    plan = Plan(units=[Unit("a"), Unit("b")])
    scored = [{"depth": depth, "hits": hits, "tried": 1, "found": [hits]} for depth, hits in ((0.0, 1), (100.0, 0))]
    plots = [dataclasses.asdict(plot) for plot in evaluation.summarize(plan, scored).plots]
    result = made_result(evaluation="retrieval", options={"length": 300}, plots=plots)
    assert depth_profile(result) == (300, [0.0, 100.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="a result of perplexity has no success by depth"):
        depth_profile(made_result(evaluation="perplexity", options={"length": 300}))


def test_the_picture(tmp_path, monkeypatch):
    drawn, draw = [], Axes.pcolormesh

    def record(self, x, y, values, **options):
        drawn.append((x, y, values))
        return draw(self, x, y, values, **options)

    monkeypatch.setattr(Axes, "pcolormesh", record)
    results = [passkey(400, [100, 300], [0, 2]), passkey(200, [50, 180], [1, 2])]
    path = draw_length_by_depth(results, tmp_path / "new" / "depth.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # the shorter length first; the border lies half-way between the depths
    assert drawn[:2] == [  # then comes the colour bar
        ([-0.46, 0.46], [0.0, 42.5, 100.0], [[1.0], [0.5]]),
        ([0.54, 1.46], [0.0, 50.0, 100.0], [[1.0], [0.0]]),
    ]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (passkey(400, [9], [1], checkpoint={"name": "yarn", "hash": "h2"}), "2 checkpoints: base, yarn"),
        (passkey(400, [9], [1], protocol_id="passkey-v2:length=400"), "of which only the length may differ"),
        (passkey(200, [9, 99], [1, 1]), r"two results have the same length \(200, 200\)"),
    ],
)
def test_results_that_do_not_belong_together(tmp_path, other, message):
    with pytest.raises(ValueError, match=message):
        draw_length_by_depth([passkey(200, [50, 180], [1, 2]), other], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
