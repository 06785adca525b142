"""Success by depth, from distances to the end and from depths."""

import dataclasses

import pytest
from result_maker import made_result

from ctxext.evals.passkey import PasskeyRetrieval
from ctxext.evals.retrieval import Retrieval
from ctxext.evaluation.base import Plan, Unit
from ctxext.evaluation.heatmap import depth_profile


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
