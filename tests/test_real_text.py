"""Protocol, views and scoring on real Wikipedia paragraphs and questions, where at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from crrl_lib.protocol import (
    information,
    neutralise,
    parse_action,
    prompt_text,
    render_passages,
    split_sentences,
)
from crrl_lib.records import Question, Trajectory, Turn
from crrl_lib.refiner import ground
from crrl_lib.scoring import contains, exact_match, f1, recalled, recalled_refined, summarise
from crrl_lib.sources import load_passages, load_questions
from crrl_lib.views import VIEWS, context_ids

REAL = Path(__file__).resolve().parents[2] / "shared" / "data"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/data beside the repository")
SETS = {"hotpotqa_train": 0.6, "musique_train": 0.95}  # share of golds that stand in their passages


@pytest.fixture(scope="module", params=list(SETS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def passages(name):
    return {p.id: p for p in load_passages(REAL / f"{name}_corpus.json")}


@pytest.fixture(scope="module")
def questions(name, passages):
    return load_questions(REAL / f"{name}.json", list(passages.values()))


def run(q: Question, passages: dict) -> Trajectory:
    """One search that found just what was needed, and the gold as the answer."""
    read = tuple(passages[i] for i in q.supporting_ids)
    turns = (Turn("", query="x", passages=read, observation=render_passages(read)),)
    return Trajectory(q, (*turns, Turn("", answer=q.answers[0])), "answer")


def test_real_text_speaks_no_protocol(passages):
    for p in passages.values():
        shown = information(neutralise(render_passages([p])), "paper")
        assert parse_action(shown).kind == "invalid"
        assert shown.count("</information>") == 1


def test_sentences_of_real_text_join_to_what_they_came_from(passages):
    for p in passages.values():
        assert "".join("".join(split_sentences(p.text)).split()) == "".join(p.text.split())


def test_grounding_keeps_real_sentences_as_they_are(passages):
    for p in list(passages.values())[:100]:
        sentence = split_sentences(p.text)[0]
        others = list(passages.values())[:3]
        made = ground(f"(Title: {p.title}) {sentence}", [*others, p])
        assert "".join(sentence.split()) in "".join(made.split())


def test_golds_match_themselves_and_stand_in_their_passages(name, passages, questions):
    found = []
    for q in questions:
        assert all(exact_match(a, q.answers) and f1(a, q.answers) == 1 for a in q.answers)
        assert not exact_match("", q.answers)
        t = run(q, passages)
        assert recalled_refined(t) >= recalled(t)
        spoken = q.answers[0].lower() in ("yes", "no")
        found += [] if spoken or not q.supporting_ids else [recalled(t)]
    assert len(found) > 50
    assert sum(found) / len(found) > SETS[name]


def test_a_summary_of_real_runs_counts_what_was_made_right(passages, questions):
    chosen = [q for q in questions if q.supporting_ids][:60]
    runs = [run(q, passages) for q in chosen]
    wrong = [Trajectory(t.question, (t.turns[0], Turn("", answer="¿?")), "answer") for t in runs]
    metrics = summarise(runs[:45] + wrong[45:])
    assert (metrics["n"], metrics["em"], metrics["art"]) == (60, 0.75, 1.0)
    assert metrics["recall_accuracy"] <= metrics["recall_rate"]


@pytest.mark.parametrize("view", list(VIEWS))
def test_views_of_real_runs_hide_just_what_they_say(passages, questions, view):
    encode = lambda text: tuple(text.encode())  # noqa: E731
    for q in [q for q in questions if len(q.supporting_ids) > 1][:20]:
        prompt = encode(prompt_text("paper", "search", question=neutralise(q.text)))
        turns = []
        for i, key in enumerate(q.supporting_ids[:2]):
            thought, query = f"<think>step {i}</think>", f"<search>query {i}</search>"
            shown = information(render_passages([passages[key]]), "paper")
            turns.append(
                Turn(
                    "",
                    query=f"query {i}",
                    action_ids=encode(thought + query),
                    thought_ids=encode(thought),
                    query_ids=encode(query),
                    observation_ids=encode(shown),
                )
            )
        text = bytes(context_ids(prompt, turns, VIEWS[view])).decode()
        first, last = (bytes(t.observation_ids).decode() for t in turns)
        assert last in text
        assert (first in text) == VIEWS[view].documents
        assert ("query 0" in text) == VIEWS[view].queries
        assert ("step 0" in text) == VIEWS[view].thoughts


def test_contains_needs_whole_words_in_real_titles(passages):
    for p in list(passages.values())[:200]:
        assert contains(p.title, [p.title])
        assert not contains(f"x{p.title}x", [p.title])
