"""Every supported format: the real files of ../shared/data where present, and hand-made ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crrl_lib.records import Passage, Question
from crrl_lib.sources import load_passages, load_questions, load_sets

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
real = pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data beside the repository")


def write(path: Path, content: object) -> Path:
    """Write rows as JSON lines or, for a .json name, as one JSON value."""
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in content)
    else:
        text = json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


@real
def test_real_hotpotqa():
    passages = load_passages(REAL / "hotpotqa_train_corpus.json")
    assert len(passages) == len({p.id for p in passages}) == 994
    assert passages[0].id == passages[0].title == "Demon Dice"
    assert "  " not in passages[0].text
    questions = load_questions(REAL / "hotpotqa_train.json", passages)
    assert len(questions) == 100
    first = questions[0]
    assert (first.id, first.text) == (
        "5a77ec115542992a6e59dff7",
        "If Gallu is a demon Lilu is what?",
    )
    assert (first.answers, first.family, first.hops) == (("a spirit",), "bridge", 2)
    assert first.supporting_titles == first.supporting_ids == ("Alû", "Lilu (mythology)")
    assert sum(q.family == "comparison" for q in questions) == 22
    assert all(len(q.supporting_ids) == len(q.supporting_titles) == 2 for q in questions)


@real
def test_real_musique():
    passages = load_passages(REAL / "musique_train_corpus.json")
    by_id = {p.id: p for p in passages}
    assert len(passages) == len(by_id) == 1890
    assert len({p.title for p in passages}) == 1764
    assert by_id["Publix#1"].title == by_id["Publix#2"].title == "Publix"
    assert "Publix" not in by_id
    questions = load_questions(REAL / "musique_train.json", passages)
    assert len(questions) == 100
    assert questions[0].answers == ("G. Stanley Hall", "Stanley Hall")
    assert sorted({q.hops for q in questions}) == [2, 3, 4]
    assert all(len(q.supporting_ids) == q.hops == int(q.family[0]) for q in questions)
    assert all(
        tuple(by_id[i].title for i in q.supporting_ids) == q.supporting_titles for q in questions
    )
    needed = by_id[questions[0].supporting_ids[1]]  # a homonym, found by its text
    assert needed.id == "Adolescence#1"
    assert "G. Stanley Hall" in needed.text


@real
def test_real_2wiki_and_bamboogle():
    passages = load_passages(REAL / "2wikimultihopqa_corpus.json")
    assert len(passages) == len({p.id for p in passages}) == 6119
    assert passages[0].id == "Teutberga"
    questions = load_questions(REAL / "bamboogle_test_125.jsonl")
    assert len(questions) == 125
    assert questions[0].answers == ("james madison",)
    assert {(q.family, q.hops) for q in questions} == {("bamboogle", 2)}


@real
@pytest.mark.parametrize(
    ("load", "name", "problem"),
    [
        (load_passages, "hotpotqa_train.json", "row 1: missing field 'title'"),
        (load_passages, "bamboogle_test_125.jsonl", "line 1: missing field 'title'"),
        (load_questions, "hotpotqa_train_corpus.json", "expected a list of objects, got dict"),
        (load_questions, "musique_train_corpus.json", "row 1: missing field 'answers'"),
    ],
)
def test_real_file_of_the_wrong_kind(load, name, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        load(REAL / name)
    assert name in str(caught.value)


def test_own_passages(tmp_path):
    line = '{"id": "1", "title": "Köln", "text": "On the\u2028Rhine."}\n'
    (tmp_path / "p.jsonl").write_text(line, encoding="utf-8")
    assert load_passages(tmp_path / "p.jsonl") == [Passage("1", "Köln", "On the\u2028Rhine.")]


def test_own_questions(tmp_path):
    (tmp_path / "q.jsonl").write_text(
        '{"id": "q", "question": "Where?", "answers": ["Rome", "Roma"], "family": "f", '
        '"hops": 2, "supporting_ids": ["1", "2"], "supporting_titles": ["Köln"]}\n',
        encoding="utf-8",
    )
    expected = [Question("q", "Where?", ("Rome", "Roma"), "f", 2, ("1", "2"), ("Köln",))]
    assert load_questions(tmp_path / "q.jsonl") == expected


def test_sets_are_drawn_by_seed_and_named_by_file(tmp_path):
    rows = [{"id": f"test_{i}", "question": f"Q{i}?", "answer": "A"} for i in range(40)]
    paths = [write(tmp_path / f"{name}.jsonl", rows) for name in ("nq", "popqa")]
    drawn = load_sets(paths, 10, seed=1)
    assert drawn == load_sets(paths, 10, seed=1)
    numbers = [[int(q.id.split("_")[1]) for q in drawn if q.id.startswith(f"{name}/test_")]
               for name in ("nq", "popqa")]  # fmt: skip
    assert [len(n) for n in numbers] == [10, 10]
    assert [sorted(n) for n in numbers] == numbers  # in file order
    assert max(numbers[0]) > 20  # drawn from the whole file, not its head
    assert numbers[0] != numbers[1]
    assert drawn != load_sets(paths, 10, seed=2)
    assert [q.id for q in load_sets(paths[:1], 99)] == [f"nq/{r['id']}" for r in rows]
    with pytest.raises(ValueError, match="share a name.*rename one"):
        load_sets([paths[0], paths[0]], 10)


def test_wiki18_passages(tmp_path):
    rows = [
        {"id": "0", "contents": '"Aaron"\nAaron is a prophet.\nSecond line.'},
        {"id": 1, "contents": '""Heroes" (album)"\nAn album.'},
    ]
    made = load_passages(write(tmp_path / "wiki.jsonl", rows))
    assert made == [
        Passage("0", "Aaron", "Aaron is a prophet.\nSecond line."),
        Passage("1", '"Heroes" (album)', "An album."),
    ]


def test_byte_order_mark_blank_lines_and_crlf(tmp_path):
    text = (
        '\ufeff{"id": "1", "title": "T", "text": "x"}\r\n\r\n{"id": "2", "title": "T", "text": "y"}'
    )
    (tmp_path / "p.jsonl").write_bytes(text.encode())
    assert [p.id for p in load_passages(tmp_path / "p.jsonl")] == ["1", "2"]


def test_flashrag_questions(tmp_path):
    facts = {"title": ["Rome", "Rome", "Italy"], "sent_id": [0, 1, 0]}
    rows = [
        {"id": "dev_0", "question": "q?", "golden_answers": ["a", "b", "a"], "metadata": {}},
        {
            "id": "dev_1",
            "question": "q?",
            "golden_answers": ["a"],
            "metadata": {"type": "bridge", "supporting_facts": facts},
        },
        {"id": 3, "question": "q?", "golden_answers": ["a"]},
    ]
    corpus = [Passage("7", "Rome", "x"), Passage("8", "Italy", "x"), Passage("9", "Italy", "y")]
    made = load_questions(write(tmp_path / "nq.jsonl", rows), corpus)
    assert made == [
        Question("dev_0", "q?", ("a", "b")),
        # Italy is not a unique title, so only the title is known
        Question("dev_1", "q?", ("a",), "bridge", 2, ("7",), ("Rome", "Italy")),
        Question("3", "q?", ("a",)),
    ]


HOTPOT = {
    "_id": "h",
    "question": "q?",
    "answer": "a",
    "type": "bridge",
    "supporting_facts": [["X", 0]],
    "context": [["X", ["One.", " Two."]]],
}
OWN = {"id": "1", "question": "q?", "answers": ["a"]}


def without(row: dict, name: str) -> dict:
    return {k: v for k, v in row.items() if k != name}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([OWN, without(OWN, "question") | {"id": "2"}], "line 2: missing field 'question'"),
        ([OWN, without(OWN, "id")], "line 2: missing field 'id'"),
        ([OWN, without(OWN, "answers") | {"id": "2"}], "line 2: missing field 'answers'"),
        ([OWN | {"question": "  "}], "line 1: field 'question' is empty"),
        ([OWN | {"answers": "a"}], "line 1: field 'answers' should be a list of texts, got str"),
        ([OWN | {"answers": [3]}], "line 1: field 'answers' should hold texts only"),
        ([OWN | {"answers": []}], "line 1: no accepted answer"),
        ([OWN | {"answers": [" "]}], "line 1: no accepted answer"),
        ([OWN | {"hops": "two"}], "line 1: field 'hops' should be a whole number, got str"),
        ([OWN, OWN], "line 2: id '1' was already used at .*line 1"),
        ([["not", "an", "object"]], "line 1: expected an object, got list"),
        ([without(HOTPOT, "answer")], "line 1: missing field 'answer'"),
        ([without(HOTPOT, "context")], "line 1: missing field 'context'"),
        ([without(HOTPOT, "_id")], "line 1: missing field '_id'"),
        ([HOTPOT | {"supporting_facts": [["X", 0, 1]]}], "should be lists of pairs"),
        ([{"id": "1", "question": "q?", "answer": 7}], "field 'answer' should be text, got int"),
        ([{"id": "1", "question": "q", "golden_answers": ["a"], "metadata": "x"}], "an object"),
        ([{"id": "1", "question": "q", "answer": "a", "paragraphs": [{}]}], "paragraph 1: missing"),
        ([], "no rows"),
    ],
)
def test_bad_questions_say_what_and_where(tmp_path, rows, problem):
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=problem) as caught:
        load_questions(path)
    assert "bad.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"id": "1", "title": "T"}], "row 1: missing field 'text'"),
        ([{"id": "1", "title": "", "text": "x"}], "row 1: field 'title' is empty"),
        ([{"id": "1", "contents": "no newline"}], "row 1: 'contents' should be a quoted title"),
        ([{"contents": '"T"\nx'}], "row 1: missing field 'id'"),
        ([{"id": "1", "title": "T", "text": "x"}, {"title": "U", "text": "x"}], "row 2: missing"),
        ([{"id": "1", "title": "T", "text": "x"}] * 2, "row 2: id '1' was already used"),
        ({"T": "not a list"}, "row 1: field 'sentences' should be a list of texts"),
        ("text", "expected a list of objects, got str"),
    ],
)
def test_bad_passages_say_what_and_where(tmp_path, rows, problem):
    with pytest.raises(ValueError, match=problem):
        load_passages(write(tmp_path / "bad.json", rows))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n")
    with pytest.raises(ValueError, match="ends in .json or .jsonl"):
        load_passages(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"id": "1"\n')
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        load_passages(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(ValueError, match="expected UTF-8"):
        load_passages(tmp_path / "b.jsonl")
    with pytest.raises(FileNotFoundError):
        load_passages(tmp_path / "none.jsonl")
