"""The search on a tiny model: its losses against stock transformers, resuming, processes, and wrong calls."""

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ctxext.analysis import longrope_search
from ctxext.analysis.longrope_live import LiveFactors
from ctxext.analysis.longrope_operators import Candidate, Evolution
from ctxext.analysis.longrope_search import Measure, SearchOptions, run_search
from ctxext.checkpoint.patch import patch_checkpoint
from ctxext.cli import app
from ctxext.evaluation.loading import RunSettings, load
from ctxext.evaluation.partial import Partial
from ctxext.evaluation.processes import Processes

BASE = 10000.0 ** (-np.arange(8) / 8)  # of the tiny llama: head dimension 16
SETTINGS = RunSettings(dtype="float32")
SMALL = Evolution(population=6, iterations=3, mutations=2, crossovers=2, parents=3)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(4):
        (folder / f"{index}.txt").write_text(f"{index} word {index * 7} " * 40)
    return folder


@pytest.fixture
def options(texts):
    return SearchOptions(length=256, data=str(texts), documents=1, held_out=2, budget=12, how=SMALL)


def by_hand(folder, candidate, ids, length=256, window=128):
    """Losses with rotary angles computed here, from a stock model whose rotary module is replaced."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    factor = (1 + np.log(length / window) / np.log(window)) ** 0.5

    def turn(x, position_ids, **_):
        angles = np.arange(position_ids.shape[1])[:, None] * BASE / np.array(candidate.factors)
        angles[: candidate.unscaled] = np.arange(candidate.unscaled)[:, None] * BASE
        both = np.concatenate([angles, angles], axis=1)[None]
        return tuple(torch.tensor(made * factor, dtype=torch.float32) for made in (np.cos(both), np.sin(both)))

    model.model.rotary_emb.forward = turn
    with torch.no_grad():
        log = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return -float(log[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean())


@pytest.mark.parametrize("unscaled", [0, 1, 60])
def test_a_candidate_s_loss_is_that_of_its_angles(byte_checkpoint, unscaled):
    folder = byte_checkpoint(initializer_range=0.2)
    ids = torch.randint(0, 255, (257,), generator=torch.Generator().manual_seed(0)).tolist()
    live = LiveFactors(load(folder, SETTINGS).model, BASE, 256)
    candidate = Candidate(factors=(1.0, 1.1, 1.3, 1.7, 1.8, 2.0, 2.1, 2.4), unscaled=unscaled)
    other = Candidate(factors=(2.0,) * 8)
    expected, otherwise = by_hand(folder, candidate, ids), by_hand(folder, other, ids)
    assert live.losses(candidate, [ids]) == pytest.approx([expected], rel=1e-5)
    assert live.losses(other, [ids]) == pytest.approx([otherwise], rel=1e-5), "nothing of the last one stays"
    assert abs(expected - otherwise) > 1e-3
    if unscaled:
        plain = dataclasses.replace(candidate, unscaled=0)
        assert (abs(by_hand(folder, plain, ids) - expected) > 1e-3) == (unscaled > 1), "position 0 does not turn"


def test_what_was_searched_is_what_stock_transformers_turns_with(byte_checkpoint, options, tmp_path):
    options = dataclasses.replace(options, short_budget=6)
    answer = run_search(byte_checkpoint(), tmp_path / "out", options, SETTINGS)
    factors = [json.loads((tmp_path / "out" / f"{name}_factor.json").read_text()) for name in ("long", "short")]
    assert factors == [answer["long_factor"], answer["short_factor"]]
    assert (tmp_path / "out" / "search.png").stat().st_size > 10_000
    files = [str(tmp_path / "out" / f"{name}_factor.json") for name in ("long", "short")]
    given = ["--length", "256", "--long-factor", files[0], "--short-factor", files[1]]
    made = CliRunner().invoke(
        app, ["patch", str(byte_checkpoint()), str(tmp_path / "patched"), "--method", "longrope", *given]
    )
    assert made.exit_code == 0, made.output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "patched").eval()
    rotary = model.model.rotary_emb
    for tokens, wanted in ((256, factors[0]), (100, factors[1])):
        rotary(torch.zeros(1), torch.arange(tokens)[None])
        assert rotary.inv_freq.double().numpy() == pytest.approx(BASE / np.array(wanted), rel=1e-6)
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    best = min((row for row in log["long"]), key=lambda row: row["loss"])
    assert best["factors"] == factors[0] and best["loss"] == answer["loss"]
    assert answer["methods"]["longrope"]["search"]["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert [len(log["long"]), len(log["short"])] == [12, 6]
    assert log["long"][-1]["forward_passes"] == answer["forward_passes"] == 12


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [1, 7, 11])
def test_a_killed_search_goes_on_as_if_it_had_not_been(byte_checkpoint, options, tmp_path, monkeypatch, after):
    options = dataclasses.replace(options, unscaled=(0, 8))
    run_search(byte_checkpoint(), tmp_path / "whole", options, SETTINGS)
    plain, measured = LiveFactors.losses, []

    def losses(self, candidate, sequences):
        if len(measured) == after:
            raise Killed
        measured.append(candidate.key)
        return plain(self, candidate, sequences)

    monkeypatch.setattr(LiveFactors, "losses", losses)
    with pytest.raises(Killed):
        run_search(byte_checkpoint(), tmp_path / "killed", options, SETTINGS)
    again = []
    monkeypatch.setattr(LiveFactors, "losses", lambda *given: again.append(given[1].key) or plain(*given))
    run_search(byte_checkpoint(), tmp_path / "killed", options, SETTINGS)
    assert len(again) == 12 - after and not set(again) & set(measured)
    for name in ("log.json", "result.json", "long_factor.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


class Thread(Processes):
    """A process of two, played by a thread."""

    met, given = threading.Barrier(2), {}

    def gather(self, mine):
        self.given[self.rank] = dict(mine)
        self.met.wait()
        together = {**self.given[0], **self.given[1]}
        self.met.wait()
        return together


def test_two_processes_share_the_work_and_know_the_same(tmp_path):
    class Live:
        def __init__(self):
            self.asked = []

        def losses(self, candidate, sequences):
            self.asked.append(candidate)
            return [sum(candidate.factors) / 3, 1.0]

    candidates = [Candidate(factors=(1.0, 1.0 + index / 10)) for index in range(5)]
    lives, answers = [Live(), Live()], {}

    def process(rank):
        with Partial(tmp_path / str(rank), "key") as partial:
            measure = Measure(lives[rank], [[1], [2]], "long", partial, Thread(rank=rank, count=2), lambda done: None)
            answers[rank] = [measure(candidates), measure(candidates[:2])]

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [(sum(one.factors) / 3 + 1) / 2 for one in candidates]
    assert answers[0] == answers[1] == [wanted, wanted[:2]]
    assert [live.asked for live in lives] == [candidates[0::2], candidates[1::2]]


def test_a_folder_of_another_search(byte_checkpoint, options, tmp_path):
    folder = tmp_path / "out"
    longrope_search.claim_folder(folder, {"length": 256, "data": "a"})
    with pytest.raises(ValueError, match="another search .it differs in data"):
        longrope_search.claim_folder(folder, {"length": 256, "data": "b"})
    with pytest.raises(ValueError, match="not empty and holds no search"):
        run_search(byte_checkpoint(), tmp_path / "texts", options, SETTINGS)


def test_wrong_options():
    with pytest.raises(ValueError, match="--budget 10 does not .* at least 320.*--short-budget 5 .*--unscaled"):
        SearchOptions(length=256, budget=10, short_budget=5, unscaled=(1, 2))
    with pytest.raises(ValueError, match="--held-out 1 at least 2"):
        SearchOptions(length=256, held_out=1)


def test_checkpoints_that_cannot_be_searched(byte_checkpoint, options, tmp_path):
    def refused(message, source, **changed):
        with pytest.raises(ValueError, match=message):
            run_search(source, tmp_path / "out", dataclasses.replace(options, **changed), SETTINGS)
        assert not (tmp_path / "out").exists()

    refused("--length 128 must be longer than the model's window of 128", byte_checkpoint(), length=128)
    for method, message in (("yarn", "scaled by 'yarn' already"), ("alibi", "has an attention bias")):
        patch_checkpoint(byte_checkpoint(), tmp_path / method, method=method, length=256)
        refused(message, tmp_path / method)


def test_frequencies_by_layer_type_have_no_unscaled_tokens(byte_checkpoint):
    model = load(byte_checkpoint("gemma3_text"), SETTINGS).model
    base = 1e6 ** (-np.arange(8) / 8)
    live = LiveFactors(model, base, 256)
    live.put(Candidate(factors=(2.0,) * 8))
    assert model.model.rotary_emb.full_attention_inv_freq.numpy() == pytest.approx(base / 2, rel=1e-6)
    with pytest.raises(ValueError, match="only 0 unscaled"):
        live.put(Candidate(factors=(2.0,) * 8, unscaled=4))
