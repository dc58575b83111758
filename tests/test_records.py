"""Records: what a question must have, and what a trajectory says of itself."""

from __future__ import annotations

import pytest

from crrl_lib.records import Passage, Question, Trajectory, Turn

EURO = Question("q", "What is the currency of Malta?", ("Euro",))


def test_a_question_needs_a_text_and_an_answer():
    with pytest.raises(ValueError, match="question 'q7' has an empty text; .*correct or drop"):
        Question("q7", " \n", ("Euro",))
    with pytest.raises(ValueError, match="question 'q7' has no accepted answer; expected at least"):
        Question("q7", "Where?", ())


def test_lengths_of_a_trajectory_are_counted_by_hand():
    read = Turn("t", query="a", context_ids=(1, 2, 3), action_ids=(4, 5), refiner_tokens=11)
    long = Turn("t", query="b", context_ids=tuple(range(9)), action_ids=(6,), refiner_tokens=5)
    last = Turn("t", answer="Euro", context_ids=(1, 2, 3, 4), action_ids=(7, 8, 9))
    t = Trajectory(EURO, (read, long, last), "answer")
    assert (t.context_tokens, t.context_tokens_peak) == (4, 9)
    assert t.generated_tokens == 2 + 1 + 3
    assert t.total_tokens == (3 + 2 + 11) + (9 + 1 + 5) + (4 + 3)
    assert (t.searches, t.prediction) == (2, "Euro")


def test_only_real_searches_count_and_no_answer_predicts_nothing():
    note = Turn("t", note="no tag")
    rag = Turn("t", passages=(Passage("p", "Malta", "Euro."),), answer=None, note="no tag")
    assert Trajectory(EURO, (note,), "invalid").searches == 0
    assert Trajectory(EURO, (rag,), "invalid").searches == 1
    assert Trajectory(EURO, (note,), "invalid").prediction == ""
    assert Trajectory(EURO).context_tokens == Trajectory(EURO).context_tokens_peak == 0
