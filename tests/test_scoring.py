"""Scores against hand-computed values."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from crrl_lib import scoring
from crrl_lib.records import Passage, Question, Trajectory, Turn

# The cores may be busy: how long an example takes says nothing here.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
BONN = Passage("p1", "Bonn", "Bonn lies on the Rhine in Germany.")
LINZ = Passage("p2", "Linz", "Linz lies on the Danube in Austria.")


def run(
    *turns: Turn, answers: tuple[str, ...] = ("Germany",), end: str = "answer", key: str = "q"
) -> Trajectory:
    question = Question(key, "In which country is Bonn?", answers, family="country")
    return Trajectory(question, turns, end)


def search(*passages: Passage, observation: str = "seen", **more) -> Turn:
    more = {"context_ids": (1,) * 10, "action_ids": (2,) * 4} | more
    return Turn("I search.", query="Bonn", passages=passages, observation=observation, **more)


def answer(text: str, **more) -> Turn:
    more = {"context_ids": (1,) * 30, "action_ids": (2,) * 6} | more
    return Turn("I know.", answer=text, **more)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel  Tower!", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("O\u2019Brien", "obrien"),
        ("O'Brien", "obrien"),
        ("Hawai\u02bbi", "hawaii"),
        ("O\u00b4Brien", "obrien"),
        ("\u201cquoted\u201d \u00abwords\u00bb", "quoted words"),
        ("1939\u20131945", "19391945"),
        ("1939\u20141945", "19391945"),
        ("\u22125 \u00b0C", "5 °c"),
        ("1,000", "1000"),
        ("5%", "5"),
        ("Jose\u0301", "josé"),
        ("Jos\u00e9", "josé"),
        ("\uff32\uff4f\uff4d\uff45", "rome"),
        ("stra\u00dfe", "strasse"),
        ("\u0130zmir", "i\u0307zmir"),
        ("a\u00a0b\u2009c\u3000d", "b c d"),
        ("zero\u200bwidth soft\u00adhyphen", "zerowidth softhyphen"),
        ("\ufb01sh \u00bd", "fish 12"),
        ("\u3000\u3002", ""),
        ("The", ""),
        ("", ""),
    ],
)
def test_normalise(text, expected):
    assert scoring.normalise(text) == expected


@patient
@given(st.text())
def test_normalise_is_idempotent_and_blind_to_composition(text):
    once = scoring.normalise(text)
    assert scoring.normalise(once) == once
    assert scoring.normalise(unicodedata.normalize("NFD", text)) == once
    assert scoring.normalise(unicodedata.normalize("NFC", text)) == once


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("the Beatles", ["Beatles"], True),
        ("Beatles", ["Stones", "The Beatles."], True),
        ("Beatle", ["Beatles"], False),
        ("", ["Beatles"], False),
        ("  ", ["Beatles"], False),
        ("Jose\u0301", ["Jos\u00e9"], True),
        ("Jose", ["Jos\u00e9"], False),
        ("A", ["A"], True),  # a gold of articles alone is compared as written …
        (" A ", ["A "], True),
        ("The", ["A"], False),  # … so another empty one does not match it
        ("?", ["A"], False),
        ("anything", ["A"], False),
        ("", ["A"], False),
        ("", ["?"], False),
        ("", [""], False),
        ("...", ["Rome"], False),
        ("Rome", [], False),
    ],
)
def test_exact_match(prediction, answers, expected):
    assert scoring.exact_match(prediction, answers) is expected


def test_answers_as_one_text_are_refused():
    for score in (scoring.exact_match, scoring.f1, scoring.contains, scoring.cover_em):
        with pytest.raises(TypeError, match="must be a list of texts, got the text 'Rome'"):
            score("Rome", "Rome")


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("new york city", ["New York"], 0.8),  # precision 2/3, recall 1
        ("york york", ["York"], 2 / 3),  # a repeated token counts once
        ("Paris", ["London", "Paris, France"], 2 / 3),
        ("Paris", ["Rome"], 0.0),
        ("", ["Rome"], 0.0),
        ("A", ["A"], 1.0),
        ("The", ["A"], 0.0),
    ],
)
def test_f1(prediction, answers, expected):
    assert scoring.f1(prediction, answers) == pytest.approx(expected)


@patient
@example(":\r", ":")
@given(st.text(max_size=30), st.text(max_size=30))
def test_f1_is_symmetric_bounded_and_one_on_a_match(a, b):
    assert 0 <= scoring.f1(a, [b]) <= 1
    if scoring.normalise(a) and scoring.normalise(b):
        assert scoring.f1(a, [b]) == pytest.approx(scoring.f1(b, [a]))
    if scoring.exact_match(a, [b]):
        assert scoring.f1(a, [b]) == 1
        assert scoring.cover_em(a, [b])


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("He moved to New York City.", ["new york"], True),
        ("He moved to New Yorkshire.", ["New York"], False),
        ("York is new", ["New York"], False),  # order counts
        ("born in\n1905", ["1905"], True),
        ("born in 19056", ["1905"], False),
        ("The Who toured", ["Who"], True),
        ("Plan A failed", ["A"], True),
        ("Plan B failed", ["A"], False),
        ("", ["A"], False),
        ("text", [""], False),
    ],
)
def test_contains(text, answers, expected):
    assert scoring.contains(text, answers) is expected
    assert scoring.cover_em(text, answers) is expected


def test_three_definitions_of_recall_differ():
    hit = run(search(LINZ), search(BONN, observation="Nothing relevant."), answer("Austria"))
    assert scoring.recalled(hit)
    assert not scoring.recalled_refined(hit)
    assert not scoring.recalled_loose(hit)

    refined = run(search(LINZ, observation="It is in germany."), answer("Austria"))
    assert not scoring.recalled(refined)
    assert scoring.recalled_refined(refined)
    assert not scoring.recalled_loose(refined)  # the authors' is case-sensitive …

    by_answer = run(search(LINZ), answer("West Germany"))
    assert not scoring.recalled(by_answer)
    assert scoring.recalled_loose(by_answer)  # … and counts the answer itself


def test_recall_looks_at_titles_but_not_across_their_end():
    paris = Passage("p", "Paris", "Texas is a state.")
    assert scoring.recalled(run(search(paris), answers=("Paris",)))
    assert not scoring.recalled(run(search(paris), answers=("Paris, Texas",)))


def test_reward():
    assert scoring.reward_em(run(search(BONN), answer("germany"))) == 1
    assert scoring.reward_em(run(answer("Austria"))) == 0
    assert scoring.reward_em(run(search(BONN), end="budget")) == 0
    assert scoring.reward_em(run(answer("Germany"), Turn("?", note="no tag"), end="invalid")) == 0
    half = run(answer("west germany"))
    assert scoring.reward_em(half) == 0
    assert scoring.reward_f1(half) == pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert scoring.reward_f1(run(answer("Germany"), Turn("?", note="no tag"), end="invalid")) == 0
    assert {"em": scoring.reward_em, "f1": scoring.reward_f1} == scoring.REWARDS


def test_summary_by_hand():
    runs = [
        run(search(BONN, LINZ), answer("Germany"), key="right"),
        run(search(BONN), search(LINZ), answer("West Germany"), key="near"),
        run(answer("Germany"), key="internal"),
        run(search(LINZ, refiner_tokens=8), Turn("hm", note="no tag"), end="invalid", key="bad"),
    ]
    made = scoring.summarise(runs)
    low, high = scoring.bootstrap_interval([1, 0, 1, 0])
    assert made == {
        "n": 4,
        "em": 0.5,
        "em_low": low,
        "em_high": high,
        "f1": pytest.approx((1 + 2 / 3 + 1 + 0) / 4),
        "cover_em": 0.75,
        "art": 1.0,
        "context_tokens": (30 + 30 + 30 + 0) / 4,
        "context_tokens_peak": (30 + 30 + 30 + 10) / 4,
        "total_tokens": (50 + 64 + 36 + 22) / 4,
        "recall_rate": 0.5,
        "recall_rate_refined": 0.0,
        "recall_accuracy": 0.25,
        "recall_rate_loose": 0.75,
        "internal": 0.25,
        "valid_actions": 7 / 8,
        "answered": 0.75,
        "generated_tokens": (10 + 14 + 6 + 4) / 4,
    }


def test_summary_without_retrieval_has_no_recall():
    made = scoring.summarise([replace(run(answer("Germany")), prompt="cot")])
    null = {name for name, value in made.items() if value is None}
    assert null == {
        "recall_rate",
        "recall_rate_refined",
        "recall_accuracy",
        "recall_rate_loose",
        "internal",
    }
    assert made["em"] == 1


def test_summary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one question"):
        scoring.summarise([])


def test_numbers_come_back_from_stored_rows(tmp_path):
    pd = pytest.importorskip("pandas")
    runs = [run(search(BONN), answer("Germany")), run(answer("no"), key="r")]
    pd.DataFrame(scoring.question_rows(runs)).to_parquet(tmp_path / "rows.parquet")
    rows = pd.read_parquet(tmp_path / "rows.parquet").to_dict("records")
    assert scoring.summarise_rows(rows) == scoring.summarise(runs)
    assert rows[0]["prediction"] == "Germany"
    assert list(rows[0]["answers"]) == ["Germany"]


def test_bootstrap_agrees_with_theory_and_is_reproducible():
    values = np.repeat([0.0, 1.0], [300, 100])
    low, high = scoring.bootstrap_interval(values, rng=1, resamples=4000)
    half = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert low == pytest.approx(0.25 - half, abs=0.006)
    assert high == pytest.approx(0.25 + half, abs=0.006)
    assert (low, high) == scoring.bootstrap_interval(values, rng=1, resamples=4000)
    uneven = np.random.default_rng(0).random(50)
    assert scoring.bootstrap_interval(uneven, 1) != scoring.bootstrap_interval(uneven, 2)
    narrow = scoring.bootstrap_interval(values, level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert scoring.bootstrap_interval([0.3] * 5) == pytest.approx((0.3, 0.3))


def test_bootstrap_draws_in_blocks_when_there_are_many_values():
    values = np.repeat([0.0, 1.0], 30_000)  # 34 blocks of resamples
    low, high = scoring.bootstrap_interval(values, resamples=300)
    assert low == pytest.approx(0.5 - 0.004, abs=0.001)
    assert high == pytest.approx(0.5 + 0.004, abs=0.001)


@pytest.mark.parametrize("values", [[], [[1.0, 0.0]]])
def test_bootstrap_refuses_what_is_no_vector(values):
    with pytest.raises(ValueError, match="non-empty vector"):
        scoring.bootstrap_interval(values)


@pytest.mark.parametrize("only", [(0, 0), (1, 0), (3, 3), (2, 9), (41, 20), (700, 500)])
def test_mcnemar_is_the_exact_binomial_test(only):
    from scipy.stats import binomtest

    n = sum(only)
    expected = binomtest(only[0], n, 0.5).pvalue if n else 1.0
    assert scoring.mcnemar(*only) == pytest.approx(expected)


def test_paired_difference_by_hand():
    a, b = [1, 1, 1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1]
    made = scoring.paired_difference(a, b)
    assert made.mean == 0.5
    assert made.p_value == pytest.approx(14 / 64)  # 5 against 1: 2 · (1 + 6) / 2⁶
    assert made.low < 0.5 < made.high
    same = scoring.paired_difference(a, a)
    assert same == (0, 0, 0, 1)


def test_pairing_narrows_the_interval():
    rng = np.random.default_rng(0)
    b = rng.integers(2, size=500)
    a = np.where(rng.random(500) < 0.05, 1, b)
    paired = scoring.paired_difference(a, b)
    apart = scoring.paired_difference(a, rng.permutation(b))
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)


def test_paired_difference_of_graded_scores_has_no_mcnemar():
    assert scoring.paired_difference([0.5, 1.0], [0.0, 1.0]).p_value is None


def test_paired_difference_needs_the_same_questions():
    with pytest.raises(ValueError, match="one length"):
        scoring.paired_difference([1, 0], [1])
