"""Question answering: scores by hand, documents to the token, and a model that knows what it was shown."""

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from answering_model import AnsweringModel
from helpers import BOS, byte_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.evals import qa_scores
from ctxext.evals.qa_data import PROMPT, read_questions
from ctxext.evals.qa_planted import FORMS, TOLERANCE, open_text, planted_questions
from ctxext.evals.qa_readers import CONFIDENCES, bm25_scores, cut_chunks, joined, kept_parts
from ctxext.evals.question_answering import QuestionAnswering, chance_seen
from ctxext.evaluation.base import Session
from ctxext.evaluation.compare import compare_results
from ctxext.evaluation.loading import RunSettings
from ctxext.evaluation.prompts import encode
from ctxext.evaluation.runner import evaluate, run_evaluation
from ctxext.reading.memory import MemoryConfig
from ctxext.reading.reader import CONFIDENCES as READER_CONFIDENCES
from ctxext.reading.reader import DocumentReader
from ctxext.reading.skip import SkipPolicy

WORDS = "kelp moss fern reed sedge rush thyme sage mint dill leek kale chard beet turnip radish".split()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 40 kB of lines with no digit, so that every number of a document was planted."""
    draw = random.Random(3)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(1000)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def solve(prompt):
    """Answer a question about what stands before it, and say so if the answer does not."""
    if city := re.search(r"Which animal is on the flag of (\w+)\?", prompt):
        found = re.search(rf"The animal on the flag of {city.group(1)} is a ([\w ]+)\.", prompt)
    else:
        found = re.search(r"The pass key is (\d+)\. Remember it\. \1 is the pass key\.", prompt)
    return f" {found.group(1)}." if found else " unknown"


class ReadingModel(AnsweringModel):
    """Gives each of its 300 tokens the same probability when it reads, and keeps the windows."""

    def __init__(self, solve=solve):
        super().__init__(solve)
        self.windows = []
        self.generation_config = None

    def get_output_embeddings(self):
        return None

    def forward(self, input_ids, past_key_values=None, use_cache=True, logits_to_keep=1):
        if past_key_values is not None:
            return super().forward(input_ids, past_key_values, use_cache, logits_to_keep)
        self.windows.append(input_ids[0].tolist())
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 300))

    def generate(self, ids, *, max_new_tokens, **options):
        for _ in range(max_new_tokens):
            token = self.next_token(self.tokenizer.decode(ids[0].tolist()))
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            if token in self.generation_config.eos_token_id:
                break
        return ids


def ask(text, model=None, **options):
    """Evaluate a model that answers what it was shown; return the summary and the questions' scores."""
    model = model or ReadingModel()
    options = {"text": text, "length": 2000, "depths": 5, "trials": 2, "distractors": 2, **options}
    if "memory_size" not in options:
        options.setdefault("context", 10_000)
    summary = evaluate(QuestionAnswering(**options), Session(model, model.tokenizer))
    json.dumps(summary.details)
    return summary, list(summary.details["questions"].values())


@pytest.mark.parametrize(
    ("said", "normal"),
    [
        ("  The Cat ", "cat"),
        ("U.S.A.", "u s"),  # the "a" that is left is an article
        ("A-ha", "ha"),
        ("new_york", "new york"),
        ("‘Rock ´n` Roll’", "rock n roll"),
        ("rock'n'roll", "rock n roll"),
        ("theatre an-other", "theatre other"),
        ("ÉCOLE\n des  Beaux–Arts", "école des beaux–arts"),  # an en dash is not among the script's punctuation
        ("The", ""),
    ],
)
def test_normalization_by_hand(said, normal):
    assert qa_scores.normalize(said) == normal


def test_scores_by_hand():
    assert qa_scores.exact_match("the U.S.A!", "u s") == 1 and qa_scores.exact_match("12345 67", "12345") == 0
    # four words said, two wanted, two in common: precision 1/2, recall 1
    assert qa_scores.f1("the big red fox jumped", "a red fox") == pytest.approx(2 * 0.5 * 1 / 1.5)
    # a word counts as often as both have it: 2 of 3 and 2 of 4
    assert qa_scores.f1("go go stop", "go go go home") == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert qa_scores.f1("one", "two") == 0
    # quirks of the official script: nothing equals nothing, and has no word in common with it
    assert qa_scores.exact_match("The", "a") == 1 and qa_scores.f1("The", "a") == 0
    assert qa_scores.contains("It is in New York, I think", "the New York") == 1
    assert qa_scores.contains("theatre art", "tea") == qa_scores.contains("12345", "1234") == 0
    assert qa_scores.contains("anything", "The") == 0
    assert qa_scores.best(qa_scores.f1, "red fox", ["wolf", "fox", "red dog fox"]) == pytest.approx(0.8)
    assert qa_scores.prediction("\n  Paris. \nBerlin", None) == "Paris." and qa_scores.prediction(" \n", None) == ""
    assert qa_scores.prediction(" is 12345, not 6", r"\d+") == "12345" and qa_scores.prediction("no", r"\d+") == ""


def planted(tokenizer, text, **changes):
    options = {"form": "passkey", "repeats": 1, "length": 1500, "depths": 3, "trials": 2, "distractors": 3, "seed": 0}
    options |= changes
    return planted_questions(tokenizer, open_text(text, options["length"]), **options)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("tokens", ["bytes", "words"])
def test_planted_documents(text, form, repeats, tokens):
    if tokens == "words":
        from transformers import AutoTokenizer

        tokenizer, source = AutoTokenizer.from_pretrained(resolve_checkpoint("tiny")), "sympy-source"
    else:
        tokenizer, source = byte_tokenizer(), text
    questions = planted(tokenizer, source, form=form, repeats=repeats)
    assert len({question.id for question in questions}) == 6 == len({question.document for question in questions})
    statement = {"passkey": "The pass key is {0}. Remember it. {0} is the pass key.", "needle": "is a {0}."}[form]
    other = {"passkey": r"^The (?!pass )\w+ key is \d+\. Remember", "needle": r"^The animal on the flag of"}[form]
    for question in questions:
        off = len(encode(tokenizer, question.document)) - 1500
        assert off == 0 if tokens == "bytes" else abs(off) <= TOLERANCE * (repeats + 3)
        (answer,) = question.answers
        assert len(question.statements) == repeats
        for start, end in question.statements:
            assert question.document[start:end].endswith(statement.format(answer))
            assert question.document[start - 1] == "\n" == question.document[end]
        assert question.document.count(statement.format(answer)) == repeats
        lines = re.findall(other, question.document, re.MULTILINE)
        assert len(lines) == 3 + (repeats if form == "needle" else 0)
        # the first copy lies at the stated depth, less a line, give or take what else was planted
        assert abs(question.statements[0][0] / len(question.document) - question.depth) < 0.3
    starts = [question.statements[0][0] for question in questions if question.id.endswith("/0")]
    assert starts == sorted(starts) and starts[0] == 1, "of several statements at the start the fact is the first"
    again = planted(tokenizer, source, form=form, repeats=repeats)
    assert again == questions and planted(tokenizer, source, form=form, repeats=repeats, seed=1) != questions


def test_a_document_has_its_length_where_statements_and_text_share_tokens(text):
    """Two line breaks are one token here, so that each statement takes one fewer than on its own."""
    tokenizer = byte_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())
    model["model"]["merges"], model["model"]["vocab"]["ĊĊ"] = [["Ċ", "Ċ"]], 258
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(model)))
    for question in planted(tokenizer, text, repeats=12):
        assert len(encode(tokenizer, question.document)) == 1500 < len(question.document)


def test_the_copies_are_spread_over_the_document(text):
    """Of 40 documents with 16 copies, 15 each lie anywhere: a third in each third, to within four deviations."""
    thirds = Counter()
    for question in planted(byte_tokenizer(), text, repeats=16, length=6000, depths=1, trials=40, distractors=0):
        length = len(question.document)
        thirds.update(int(3 * start / length) for start, _ in question.statements[1:])
    assert sum(thirds.values()) == 600
    assert all(abs(thirds[third] - 200) < 4 * math.sqrt(600 * 2 / 9) for third in range(3))


def test_the_text_differs_between_trials_and_may_be_the_passkeys_filler(text):
    tokenizer = byte_tokenizer()
    first, second = planted(tokenizer, text, depths=1, distractors=0)
    whole = open(text).read()
    places = [whole.index(question.document[:200]) for question in (first, second)]
    # the second begins with the first line behind the first one's 1500 bytes
    assert places == [0, whole.index("\n", 1500) + 1]
    first, last = planted(tokenizer, text, depths=2, trials=1, distractors=0)
    assert first.statements[0][0] == 1 and last.statements[0][1] == len(last.document) - 1
    (noise,) = planted(tokenizer, "noise", depths=1, trials=1, distractors=0)
    assert noise.document.startswith("The grass is green. The sky is blue.") and len(noise.document) == 1500
    with pytest.raises(ValueError, match="words.txt holds fewer tokens than the --length 90000 .* with --text"):
        planted(tokenizer, text, length=90_000)
    with pytest.raises(ValueError, match="--length 60 is too short: the statements alone take 2.. tokens"):
        planted(tokenizer, text, length=60)


def found(questions):
    return [question["exact_match"] for question in questions]


def test_truncation_finds_what_it_keeps(text):
    context = 1000
    for keep, kept in (
        ("start", lambda d, room: d[:room]),
        ("end", lambda d, room: d[-room:]),
        ("middle-out", lambda d, room: d[: room - room // 2] + "\0" + d[len(d) - room // 2 :]),
    ):
        summary, questions = ask(text, reader="truncate", keep=keep, context=context, depths=9)
        documents = planted(byte_tokenizer(), text, length=2000, depths=9, distractors=2)
        # the answer has 6 bytes, twice those are asked for, and one token begins the prompt
        room = context - 12 - len(documents[0].prompt) - 1
        inside = [
            float(question.document[slice(*question.statements[0])] in kept(question.document, room))
            for question in documents
        ]
        assert found(questions) == inside == [float(question["copies_seen"]) for question in questions]
        assert 0 < sum(inside) < len(inside)
        assert {question["tokens_read"] for question in questions} == {room}
        assert summary.metrics["share_read"] == pytest.approx(room / 2000) == summary.metrics["chance_seen"]
        assert summary.metrics["seen"] == summary.metrics["exact_match"] and summary.metrics["answered_of_seen"] == 1


def test_reading_in_order_sees_everything(text):
    model = ReadingModel()
    summary, questions = ask(text, model, reader="in-order", repeats=3)
    assert found(questions) == [1.0] * 10 and {question["copies_seen"] for question in questions} == {3}
    assert summary.metrics["share_read"] == summary.metrics["chance_seen"] == 1
    # a window has 128 tokens, the first of them the one that begins a document
    assert {question["windows"] for question in questions} == {16} and {len(ids) for ids in model.windows} == {128, 81}
    assert all(ids[0] == BOS for ids in model.windows[::16])
    # in a short context only what was read last stands before the question
    late, questions = ask(text, reader="in-order", context=500)
    assert late.metrics["seen"] == 1 and late.metrics["answered_of_seen"] == late.metrics["exact_match"]
    rows = late.details["found_by_depth"]
    assert [row["depth"] for row in rows] == [0, 25, 50, 75, 100]
    assert [row["found"] for row in rows] == [0, 0, 0, 0, 1]
    assert all((row["seen"], row["questions"]) == (1, 2) for row in rows)
    assert late.plots[1].kind == "heat" and late.plots[1].y == [0, 0, 0, 0, 1]


def test_skipping_sees_what_was_read(text):
    """Each prediction costs ln 300 = 5.70 nats: a threshold of 6 skips once the rate, one of 5 never."""
    model = ReadingModel()
    options = {"depths": 9, "trials": 3, "length": 3000, "skip_rate": 256}
    summary, questions = ask(text, model, reader="skip", alpha=6.0, **options)
    documents = planted(byte_tokenizer(), text, length=3000, depths=9, trials=3, distractors=2)
    windows = iter(model.windows)
    for question, document in zip(questions, documents, strict=True):
        ids = [next(windows) for _ in range(question["windows"])]
        texts = [byte_tokenizer().decode(tokens).removeprefix("<s>") for tokens in ids]
        assert question["tokens_read"] == sum(map(len, texts)) and question["document_tokens"] == 3000
        statement = document.document[slice(*document.statements[0])]
        # windows that touch read a statement together: only the last ones, where less than the rate remains
        shown = "".join(texts)
        assert question["exact_match"] == question["copies_seen"] == float(statement in shown)
        # each window but the last is followed by a skip of 256 tokens, and on to the next line
        skips = len(texts) - 1 - sum(a + b in document.document for a, b in zip(texts, texts[1:], strict=False))
        assert 5 <= skips <= 3000 / (128 + 256)
    assert 0 < summary.metrics["seen"] < 1 and summary.metrics["answered_of_seen"] == 1
    assert 0.2 < summary.metrics["share_read"] < 0.5
    mean = math.fsum(q["tokens_read"] for q in questions) / len(questions)
    assert summary.metrics["tokens_read"] == mean == pytest.approx(3000 * summary.metrics["share_read"])
    everything, _ = ask(text, reader="skip", alpha=5.0, **options)
    assert everything.metrics["share_read"] == everything.metrics["exact_match"] == 1
    blind, _ = ask(text, ReadingModel(lambda prompt: " 7"), reader="skip", alpha=6.0, **options)
    assert (blind.metrics["seen"], blind.metrics["answered_of_seen"]) == (summary.metrics["seen"], 0)


def test_the_chance_to_have_seen_a_fact_by_hand(text):
    assert [chance_seen(0.25, r) for r in (1, 2)] == [0.25, 0.4375] and chance_seen(0.5, 4) == 0.9375
    assert chance_seen(0.0, 16) == 0 and chance_seen(1.0, 16) == 1
    summary, questions = ask(text, reader="truncate", context=1000, repeats=4)
    room = 1000 - 12 - len("\nWhat is the pass key? The pass key is") - 1
    assert summary.metrics["chance_seen"] == pytest.approx(1 - (1 - room / 2000) ** 4)


def test_nothing_seen_is_not_a_rate_of_zero(text):
    summary, _ = ask(text, reader="truncate", context=200, depths=1)
    assert summary.metrics["seen"] == 0 and summary.metrics["answered_of_seen"] is None


def test_bm25_by_an_independent_computation():
    texts = ["Red fox, red den", "the blue fox sleeps in the blue den", "green grass", "a red red red barn"]
    scores = bm25_scores("What colour is the red fox?", texts)
    stop = {"what", "is", "the", "in", "a"}
    words = [[w for w in re.findall(r"\w\w+", text.lower()) if w not in stop] for text in texts]
    mean = sum(map(len, words)) / len(words)
    for text, score in zip(words, scores, strict=True):
        wanted = 0.0
        for word in ("colour", "red", "fox"):
            have = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - have + 0.5) / (have + 0.5))
            count = text.count(word)
            wanted += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(text) / mean))
        assert score == pytest.approx(wanted, rel=1e-5)
    assert bm25_scores("zebra", texts) == bm25_scores("the", texts) == [0.0] * 4
    assert bm25_scores("fox", ["...", "!!"]) == [0.0, 0.0]


def test_parts_and_chunks_by_hand():
    assert kept_parts(5, 5, "end") == [(0, 5)] and kept_parts(4, 9, "middle-out") == [(0, 4)]
    assert kept_parts(10, 3, "start") == [(0, 3)] and kept_parts(10, 3, "end") == [(7, 10)]
    assert kept_parts(10, 3, "middle-out") == [(0, 2), (9, 10)] and kept_parts(10, 1, "middle-out") == [(0, 1)]
    assert joined([(0, 3), (3, 5), (6, 7)]) == ((0, 5), (6, 7))
    text = "ab\ncdef\nghijklmn\no"
    bytes_ = [(at, at + 1) for at in range(len(text))]
    # lines of 3, 5, 9 and 1 bytes; a chunk ends before a line break too, where some tokenizers join it to what follows
    assert [text[a:b] for a, b in cut_chunks(text, bytes_, 8)] == ["ab\ncdef\n", "ghijklmn", "\no"]
    assert [text[a:b] for a, b in cut_chunks(text, bytes_, 4)] == ["ab\n", "cdef", "\n", "ghij", "klmn", "\no"]
    assert cut_chunks("", [], 4) == []


def test_bm25_reads_the_chunks_with_the_fact(text):
    summary, questions = ask(text, reader="bm25", context=600, window=150, fact="needle", repeats=2, length=3000)
    assert summary.metrics["exact_match"] == summary.metrics["seen"] == 1
    assert all(300 < question["tokens_read"] < 500 for question in questions)
    prompts = []
    model = ReadingModel(lambda prompt: prompts.append(prompt) or " none")
    ask(text, model, reader="bm25", context=600, window=150, depths=1, trials=1)
    (document,) = planted(byte_tokenizer(), text, length=2000, depths=1, trials=1, distractors=2)
    lines = prompts[0].removeprefix("<s>").removesuffix(document.prompt).splitlines()
    places = [document.document.index(line) for line in lines if len(line) > 30]
    assert places == sorted(places) and len(lines) > 3, "the document's order, not that of the scores"
    assert prompts[0].endswith(document.prompt)


@pytest.mark.parametrize("reader", ["truncate", "in-order", "bm25"])
def test_readers_agree_on_a_document_that_fits(byte_session, text, reader):
    """The prompt is the whole document and then the question; the answer that of a plain loop."""
    session = byte_session(initializer_range=0.2, max_position_embeddings=512)
    options = {"length": 300, "depths": 2, "trials": 2, "distractors": 0}
    evaluation = QuestionAnswering(reader=reader, text=text, **options)
    answers = [q["generation"] for q in evaluate(evaluation, session).details["questions"].values()]
    for document, answer in zip(planted(session.tokenizer, text, **options), answers, strict=True):
        ids = [BOS, *encode(session.tokenizer, document.document + document.prompt)]
        start = len(ids)
        while len(ids) < start + 12 and ids[-1] != session.tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(session.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer == session.tokenizer.decode(ids[start:], skip_special_tokens=True)
    assert len(set(answers)) > 1, "a model that always answers the same would hide a mistake"


def test_a_memory_is_read_and_taken_away_again(byte_session, text):
    session = byte_session(initializer_range=0.2)
    options = {"text": text, "length": 900, "depths": 2, "trials": 1, "distractors": 1}
    reading = {"skip_rate": 64, "alpha": 8.0, "confidence": "model", "pooling": "last", "window": 100}
    evaluation = QuestionAnswering(**options, **reading, memory_size=300, top_k=20, sinks=4)
    before = session.model.config._attn_implementation
    scores = evaluate(evaluation, session).details["questions"]
    assert session.model.config._attn_implementation == before
    assert not session.model.model._forward_pre_hooks and not session.model.model._forward_hooks
    policy = SkipPolicy(rate=64, threshold=8.0, pooling="last")
    memory = MemoryConfig(size=300, top_k=20, sinks=4)
    documents = planted(session.tokenizer, text, length=900, depths=2, trials=1, distractors=1)
    for document, score in zip(documents, scores.values(), strict=True):
        with DocumentReader(
            session.model, session.tokenizer, policy=policy, window=100, memory=memory, confidence="model", bos=BOS
        ) as reader:
            windows = list(reader.read(document.document))
            assert reader.ask(document.prompt, 12) == score["generation"]
            assert (reader.tokens_read, len(windows)) == (score["tokens_read"], score["windows"])
    plain = evaluate(QuestionAnswering(**options, **reading), session).details["questions"]
    assert [q["generation"] for q in plain.values()] != [q["generation"] for q in scores.values()]
    assert evaluate(evaluation, session).details["questions"] == scores


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_questions_from_a_file(tmp_path):
    rows = [
        {"question": "Who?", "answers": ["The Fox", "fox"], "document": "A fox came."},
        {"question": "Where?", "answer": "Oslo", "documents": ["One.", " ", "In Oslo."]},
        {"question": "When?", "answers": ["now"], "document": " \n"},
        {"question": "What?", "answers": ["den"], "document": "A den."},
    ]
    path = write_rows(tmp_path / "q.jsonl", rows)
    model = ReadingModel(lambda prompt: "\n The fox!\nmore of it</s>" if "Who?" in prompt else " in Oslo town</s>")
    options = {"data": path, "reader": "truncate", "context": 200}
    plan = QuestionAnswering(**options).plan(Session(model, model.tokenizer))
    first, second, _ = (unit.work for unit in plan.units)
    assert first.prompt == PROMPT.format(question="Who?") and first.query == "Who?"
    assert second.document == "One.\n\nIn Oslo." and second.id == "q.jsonl:2"
    assert plan.skipped == {"questions_without_a_document": 1} and plan.corpus["documents"] == 3
    summary = evaluate(QuestionAnswering(**options, limit=2), Session(model, model.tokenizer))
    # "in oslo town" has one of the one wanted word among three: F1 2 * 1/3 * 1 / (4/3)
    assert list(summary.details["items"]["f1"].values()) == [0.0, 0.5]
    assert summary.metrics["contains"] == 0.5 and summary.metrics["exact_match"] == 0
    assert set(summary.metrics) == {"exact_match", "f1", "contains", "share_read", "tokens_read"}
    assert summary.metrics["share_read"] == 1 and len(summary.plots) == 1


@pytest.mark.parametrize(
    ("row", "missing"),
    [
        ({"answers": ["a"], "document": "d"}, "has no question that"),
        ({"question": "q", "answers": [], "document": "d"}, "has no answers that"),
        ({"question": "q", "answers": [3], "document": "d"}, "has no answers that"),
        ({"question": "q", "answers": ["a"]}, "has no document that"),
        ({"question": "q", "answers": ["a"], "documents": "d"}, "has no document that"),
        ({"question": " ", "answer": "", "document": None}, "has no question and no answers and no document that"),
        ([1], "holds list, not an object"),
    ],
)
def test_rows_that_lack_something(tmp_path, row, missing):
    good = {"question": "q", "answers": ["a"], "document": "d"}
    path = write_rows(tmp_path / "q.jsonl", [good, row])
    with pytest.raises(ValueError, match=f"q.jsonl, line 2, {missing}.*rows need question, answers"):
        list(read_questions(path))


def test_files_that_hold_no_questions(tmp_path):
    (tmp_path / "bad.jsonl").write_text('\n{"question"\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 2, is not JSON"):
        list(read_questions(str(tmp_path / "bad.jsonl")))
    with pytest.raises(ValueError, match="--data 'nowhere.jsonl' is neither planted, nor triviaqa, nor a file"):
        list(read_questions("nowhere.jsonl"))
    (tmp_path / "q.csv").write_text("a")
    with pytest.raises(ValueError, match="cannot read questions from .*q.csv: allowed are .jsonl and .parquet"):
        list(read_questions(str(tmp_path / "q.csv")))
    empty = write_rows(tmp_path / "e.jsonl", [{"question": "q", "answers": ["a"], "document": ""}])
    model = ReadingModel()
    with pytest.raises(ValueError, match="e.jsonl has no question with a document"):
        QuestionAnswering(data=empty).plan(Session(model, model.tokenizer))


def test_triviaqa_reads_all_its_evidence(tmp_path):
    """The columns of `mandarjoshi/trivia_qa`, configuration rc, as its parquet files hold them."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars

    rows = [
        {
            "question": f"Which one {number}?",
            "question_id": f"tc_{number}",
            "entity_pages": {"title": ["t"] * pages, "wiki_context": [f"Wiki {n}." for n in range(pages)]},
            "search_results": {"title": ["s"], "search_context": [f"Search {number}."]},
            "answer": {"aliases": ["The One"], "normalized_aliases": ["one", "1st"], "value": "The One"},
        }
        for number, pages in ((0, 2), (1, 0))
    ]
    disable_progress_bars()
    Dataset.from_list(rows).to_parquet(tmp_path / "validation-00000-of-00001.parquet")
    enable_progress_bars()
    options = {"data": "triviaqa", "data_id": str(tmp_path), "reader": "truncate", "context": 200}
    model = ReadingModel(lambda prompt: " The 1st.</s>" if "Wiki 1." in prompt else " none</s>")
    evaluation = QuestionAnswering(**options)
    plan = evaluation.plan(Session(model, model.tokenizer))
    assert [unit.work.document for unit in plan.units] == ["Wiki 0.\n\nWiki 1.\n\nSearch 0.", "Search 1."]
    assert plan.units[0].work.answers == ("one", "1st") and plan.units[1].id == "triviaqa:2"
    assert evaluate(evaluation, Session(model, model.tokenizer)).metrics["exact_match"] == 0.5
    one = QuestionAnswering(**options, limit=1).plan(Session(model, model.tokenizer))
    assert len(one.units) == 1 and one.corpus["hash"] != plan.corpus["hash"]
    with pytest.raises(ValueError, match="row 1, has no question"):
        Dataset.from_list([{"q": "x"}]).to_parquet(tmp_path / "validation-00000-of-00001.parquet")
        list(read_questions("triviaqa", data_id=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reader": "skipp"},
            "--reader 'skipp' is not known .did you mean 'skip'..; allowed: skip, in-order, truncate",
        ),
        (
            {"reader": "in-order", "skip_rate": 9, "alpha": 1.0},
            "--skip-rate has no effect with --reader in-order: lea",
        ),
        ({"reader": "truncate", "window": 9, "memory_size": 9}, "--window has no .*--memory-size has no effect with"),
        ({"reader": "bm25", "keep": "end"}, "--keep has no effect with --reader bm25"),
        ({"top_k": 4, "sinks": 2}, "--top-k has no effect without --memory-size: .*--sinks has no effect without"),
        ({"memory_size": 9, "context": 99}, "--context has no effect with --memory-size"),
        ({"memory_size": 9, "sinks": 9}, "--sinks 9 must be fewer than --memory-size 9"),
        ({"pooling": "max"}, "--pooling 'max' is not known; allowed: mean"),
        ({"confidence": "modl"}, "--confidence 'modl' is not known .did you mean 'model'"),
        ({"reader": "truncate", "keep": "middle"}, "--keep 'middle' is not known"),
        ({"fact": "key"}, "--fact 'key' is not known .did you mean 'passkey'..; allowed: passkey, needle"),
        ({"fact": "needle", "distractors": 16}, "--distractors 16: this fact has at most 15"),
        ({"limit": 3}, "--limit has no effect with --data planted"),
        ({"data": "triviaqa", "length": 9, "seed": 0}, "--length has no effect with --data triviaqa: .*--seed has no"),
        ({"data": "q.jsonl", "split": "test"}, "--split has no effect with --data q.jsonl"),
        (
            {"repeats": 0, "skip_rate": -1, "alpha": float("nan"), "bos": "x", "max_new_tokens": 0},
            "--repeats 0 must be at least 1; --max-new-tokens 0 must be at least 1; "
            "--skip-rate -1 must be at least 0; --alpha nan must be at least 0; --bos 'x'",
        ),
        ({"alpha": float("inf")}, "--alpha inf must be a number of nats"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuestionAnswering(**options)


def test_what_does_not_fit_is_refused_before_anything_is_read(text, monkeypatch):
    with pytest.raises(ValueError, match="window 129 is longer than the model's, 128 tokens"):
        ask(text, window=129)
    with pytest.raises(ValueError, match="a question of 38 tokens and an answer of 12 leave no room .* of 51 tokens"):
        ask(text, reader="truncate", context=51)
    with pytest.raises(
        ValueError, match="--window 100 is too large a chunk .* room for 49 beside .* smaller --window"
    ):
        ask(text, reader="bm25", context=100, window=100)
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        slow = SimpleNamespace(is_fast=False)
        QuestionAnswering(text=text).plan(Session(ReadingModel(), slow))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"bm25 needs bm25s, which is not installed: pip install 'ctxext\[eval\]'"):
        ask(text, reader="bm25")


def test_the_reader_is_what_is_compared_and_the_data_what_is_shared():
    one = QuestionAnswering()
    assert (
        one.protocol_id() == QuestionAnswering(reader="bm25", context=99, text="x", seed=0, length=8192).protocol_id()
    )
    assert one.protocol_id().startswith("question-answering-v1:data=planted,fact=passkey,repeats=1,length=8192,")
    changed = [
        {"repeats": 4},
        {"seed": 1},
        {"length": 99},
        {"max_new_tokens": 4},
        {"bos": "never"},
        {"fact": "needle"},
    ]
    assert len({QuestionAnswering(**change).protocol_id() for change in changed} | {one.protocol_id()}) == 7
    asked = QuestionAnswering(data="triviaqa", limit=3)
    assert asked.protocol_id() == QuestionAnswering(data="q.jsonl").protocol_id()
    assert asked.protocol_id() == "question-answering-v1:data=questions,max_new_tokens=auto,bos=auto"
    assert one.evaluated_length() is None and QuestionAnswering(window=9, context=12).evaluated_length() == 12
    assert CONFIDENCES == READER_CONFIDENCES


class Stopped(Exception):
    pass


def test_a_run_is_taken_up_and_compared(byte_checkpoint, text, tmp_path, monkeypatch):
    options = {"text": text, "length": 400, "depths": 2, "trials": 3, "distractors": 1, "max_new_tokens": 4}
    settings, evaluation = RunSettings(dtype="float32"), QuestionAnswering(**options, skip_rate=64, alpha=12.0)
    whole, _ = run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "skip.json")
    score, calls = QuestionAnswering.score, []

    def counted(self, session, unit):
        if len(calls) == 4:
            raise Stopped
        calls.append(unit.id)
        return score(self, session, unit)

    monkeypatch.setattr(QuestionAnswering, "score", counted)
    with pytest.raises(Stopped):
        run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "killed.json")
    first, calls = calls, []
    monkeypatch.setattr(QuestionAnswering, "score", lambda *args: (calls.append(args[2].id), score(*args))[1])
    resumed, _ = run_evaluation(evaluation, byte_checkpoint(), settings, tmp_path / "killed.json")
    assert len(calls) == 2 and not set(calls) & set(first)
    assert (resumed.metrics, resumed.details, resumed.plots) == (whole.metrics, whole.details, whole.plots)

    other = QuestionAnswering(**options, reader="truncate")
    run_evaluation(other, byte_checkpoint(), settings, tmp_path / "truncate.json")
    comparison = compare_results([tmp_path / "skip.json", tmp_path / "truncate.json"], tmp_path / "pictures")
    assert all(row["comparable"] for row in comparison["results"])
    assert [row["metric"] for row in comparison["results"][1]["paired"]] == ["exact_match", "f1", "contains"]
    said = " ".join(comparison["footnotes"])
    assert "reader skip: skip rate 64, alpha 12.0" in said and "reader truncate: keep start, context 128" in said
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert names == {"question-answering.png", "question-answering-by-depth.png"}


def test_importing_it_imports_no_model():
    heavy = "{'torch', 'transformers', 'datasets', 'bm25s'}"
    code = f"import sys, ctxext.evals.question_answering; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
