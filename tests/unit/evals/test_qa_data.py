"""Questions about long documents: scores by hand, planted documents to the token, files and TriviaQA."""

import json
import math
import re
from collections import Counter

import pytest
from helpers import byte_tokenizer
from reading_model import ReadingModel, planted
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ctxext.checkpoint.source import resolve_checkpoint
from ctxext.evals import qa_scores
from ctxext.evals.qa_data import PROMPT, read_questions
from ctxext.evals.qa_planted import FORMS, TOLERANCE
from ctxext.evals.question_answering import QuestionAnswering
from ctxext.evaluation.base import Session
from ctxext.evaluation.prompts import encode
from ctxext.evaluation.runner import evaluate


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
