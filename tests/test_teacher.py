"""The rule-based teacher: plans, oracle refiner, scripted agent, and both on real questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from crrl_lib.entail import lexical_containment
from crrl_lib.geo import read_passage
from crrl_lib.protocol import NOTHING_RELEVANT, render_passages
from crrl_lib.records import Passage, Question, Refined, RefineRequest, Sampling
from crrl_lib.refiner import keep_all
from crrl_lib.retriever import build_index
from crrl_lib.rollout import Method, rollout
from crrl_lib.sources import load_passages, load_questions
from crrl_lib.teacher import OracleRefiner, ScriptedTeacher, act, look_up, oracle_text, plan, select

GEO = Path(__file__).resolve().parents[1] / "data" / "geo"

CHILE = Passage(
    "c",
    "Victoria",
    "Victoria is a town in Chile. The time zone is America/Santiago. "
    "The nearest major city is Temuco, 57 km away. Its population is 25,000.",
)
TEXAS = Passage(
    "t",
    "Victoria",
    "Victoria is a city in United States. Clocks follow America/Chicago time. "
    "The closest major city is Corpus Christi, at 118 km. The population is 65,534.",
)
CANADA = Passage(
    "v",
    "Victoria",
    "Victoria is a city in Canada. Clocks follow America/Vancouver time. "
    "The nearest major city is Vancouver, 95 km away. The population is 289,625.",
)
BONN = Passage("b", "Bonn", "Bonn is a place in Germany. The population is 313,125.")
GERMANY = Passage(
    "g",
    "Germany",
    "Germany is a state in Europe. Its currency is Euro. Germany's capital is Berlin. "
    "The calling code is +49 and the internet domain is .de. "
    "It has 82,927,922 inhabitants on 357,021 square kilometres. It borders Austria, France.",
)
PERU = Passage("p", "Peru", "Peru is a country in South America. Its capital is Lima.")


class ByteEngine:
    """Bytes as tokens; the teacher needs a tokenizer only."""

    window = 1_000_000

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode()

    def chat(self, message: str) -> list[int]:
        return self.encode(f"<|user|>{message}<|assistant|>")

    def generate(self, prompts, sampling):
        raise AssertionError(
            "the teacher acts by rules; it must not ask the model it stands in for"
        )


# Plans


@pytest.mark.parametrize(
    ("question", "hops"),
    [
        ("What is the capital of Chad?", [("capital", "Chad")]),
        ("Name the calling code of South Korea.", [("calling code", "South Korea")]),
        ("In which country is Victoria near Temuco?", [("country", "Victoria near Temuco")]),
        ("Which country does Bonn belong to?", [("country", "Bonn")]),
        (
            "Which major city is nearest to Malmo in Sweden?",
            [("nearest major city", "Malmo in Sweden")],
        ),
        (
            "Which has more inhabitants, Bonn or Victoria near Temuco?",
            [("population", "Bonn"), ("population", "Victoria near Temuco")],
        ),
        (
            "What is the currency of the country of the major city nearest to "
            "Victoria in the America/Santiago time zone?",
            [
                ("nearest major city", "Victoria in the America/Santiago time zone"),
                ("country", "$"),
                ("currency", "$"),
            ],
        ),
        (
            "What is the internet domain of the country whose capital is Lima?",
            [("country with capital", "Lima"), ("internet domain", "$")],
        ),
        (
            "What is the continent of the country where Bonn lies?",
            [("country", "Bonn"), ("continent", "$")],
        ),
        (
            "Name the currency of the country that Victoria near Temuco belongs to.",
            [("country", "Victoria near Temuco"), ("currency", "$")],
        ),
        ("Who wrote Faust?", None),
        ("", None),
    ],
)
def test_plan(question, hops):
    assert plan(question) == hops


# The oracle refiner


def read(*passages: Passage):
    return [read_passage(p.title, p.text) for p in passages]


@pytest.mark.parametrize(
    ("attribute", "description", "countries"),
    [
        ("country", "Victoria", ["Chile", "United States", "Canada"]),
        ("country", "Victoria near Temuco", ["Chile"]),
        ("country", "Victoria in Canada", ["Canada"]),
        ("country", "Victoria in the America/Chicago time zone", ["United States"]),
        # A qualifier that no homonym comes close to tells nothing apart.
        ("country", "Victoria near Zzyzx", ["Chile", "United States", "Canada"]),
        ("country", "Victoria near Corpulent", ["Chile", "United States", "Canada"]),  # .21 of 1
        ("country", "Victoria near Corpus Cristi", ["United States"]),
        ("country", "Viktoria near Temuco", ["Chile"]),  # closest title
        ("country", "Bonn", ["Germany"]),
        (
            "country",
            "Bonn near Temuco",
            ["Germany"],
        ),  # one of that name: the qualifier is not asked
        ("country", "Xqw", []),
        ("currency", "Victoria", []),  # no passage of that name states one
    ],
)
def test_select(attribute, description, countries):
    readings = read(CHILE, TEXAS, CANADA, BONN, PERU)
    assert [r.facts["country"] for r in select(attribute, description, readings)] == countries


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("country of Bonn", "(Title: Bonn) Bonn is a place in Germany."),
        ("currency of Germany", "(Title: Germany) Its currency is Euro."),
        (
            "internet domain of Germany",
            "(Title: Germany) The calling code is +49 and the internet domain is .de.",
        ),
        ("country with capital Lima", "(Title: Peru) Its capital is Lima."),
        ("country with capital Bonn", "(Title: Bonn) Bonn is a place in Germany."),  # by its city
        # Told apart by near, by time zone, by country: one passage, the asked sentence alone.
        (
            "population of Victoria near Temuco",
            "(Title: Victoria) Its population is 25,000.",
        ),
        (
            "nearest major city of Victoria in the America/Chicago time zone",
            "(Title: Victoria) The closest major city is Corpus Christi, at 118 km.",
        ),
        ("country of Victoria in Canada", "(Title: Victoria) Victoria is a city in Canada."),
        # Not told apart: what would tell them apart is kept, the asked sentence first.
        (
            "population of Victoria",
            "(Title: Victoria) Its population is 25,000. Victoria is a town in Chile. "
            "The nearest major city is Temuco, 57 km away. The time zone is America/Santiago.\n"
            "(Title: Victoria) The population is 65,534. Victoria is a city in United States. "
            "The closest major city is Corpus Christi, at 118 km. "
            "Clocks follow America/Chicago time.\n"
            "(Title: Victoria) The population is 289,625. Victoria is a city in Canada. "
            "The nearest major city is Vancouver, 95 km away. "
            "Clocks follow America/Vancouver time.",
        ),
        ("currency of Peru", NOTHING_RELEVANT),  # Germany's would be no answer
        ("country of Xqw", NOTHING_RELEVANT),
        ("calling code of Bonn", NOTHING_RELEVANT),
        ("Who wrote Faust?", NOTHING_RELEVANT),
        ("country with capital Xqw", NOTHING_RELEVANT),
        ("", NOTHING_RELEVANT),
    ],
)
def test_oracle_text(query, text):
    passages = [CHILE, TEXAS, CANADA, BONN, GERMANY, PERU]
    assert oracle_text(query, passages) == text


def test_oracle_text_without_a_passage():
    assert oracle_text("country of Bonn", []) == NOTHING_RELEVANT


def test_the_oracle_refines_request_by_request_and_spends_no_tokens():
    question = Question("q", "In which country is Bonn?", ("Germany",))
    requests = [
        RefineRequest(question, (), "", query, (BONN, GERMANY))
        for query in ("country of Bonn", "country of Xqw")
    ]
    assert OracleRefiner()(requests) == [
        Refined("(Title: Bonn) Bonn is a place in Germany."),
        Refined(NOTHING_RELEVANT),
    ]


def test_look_up_takes_exact_titles_and_one_value():
    assert look_up("country", "Bonn", read(BONN)) == "Germany"
    assert look_up("country", "Bon", read(BONN)) is None  # the agent does not guess at names
    assert look_up("country", "Victoria", read(CHILE, CANADA)) is None
    assert look_up("country", "Victoria near Temuco", read(CHILE, CANADA)) == "Chile"
    assert look_up("country with capital", "Lima", read(GERMANY, PERU)) == "Peru"
    assert look_up("country with capital", "Quito", read(GERMANY, PERU)) is None


# The agent, step by step


def shown(*passages: Passage) -> str:
    return render_passages(passages)


WALKS = {
    "country_attribute": (
        "What is the currency of Germany?",
        [
            (
                "<think> I need the currency of Germany.</think>"
                "<search> currency of Germany</search>",
                ("currency of Germany", shown(PERU, GERMANY)),
            ),
            ("<think> Germany: the currency is Euro.</think><answer> Euro</answer>", None),
        ],
    ),
    "city_country": (
        "Which country does Victoria near Temuco belong to?",
        [
            (
                "<think> I need the country of Victoria near Temuco.</think>"
                "<search> country of Victoria near Temuco</search>",
                ("country of Victoria near Temuco", shown(TEXAS, CHILE)),
            ),
            ("<think> Victoria is in Chile.</think><answer> Chile</answer>", None),
        ],
    ),
    "city_nearest": (
        "Which major city is nearest to Victoria in Canada?",
        [
            (
                "<think> I need the nearest major city of Victoria in Canada.</think>"
                "<search> nearest major city of Victoria in Canada</search>",
                ("nearest major city of Victoria in Canada", shown(CHILE, CANADA)),
            ),
            (
                "<think> Victoria: the nearest major city is Vancouver.</think>"
                "<answer> Vancouver</answer>",
                None,
            ),
        ],
    ),
    "city_attribute": (
        "What is the calling code of the country where Bonn lies?",
        [
            (
                "<think> I need the country of Bonn.</think><search> country of Bonn</search>",
                ("country of Bonn", shown(BONN)),
            ),
            (
                "<think> Bonn is in Germany. I need the calling code of Germany."
                "</think><search> calling code of Germany</search>",
                ("calling code of Germany", shown(GERMANY)),
            ),
            ("<think> Germany: the calling code is +49.</think><answer> +49</answer>", None),
        ],
    ),
    "capital_attribute": (
        "What is the continent of the country whose capital is Lima?",
        [
            (
                "<think> I need the country with capital Lima.</think>"
                "<search> country with capital Lima</search>",
                ("country with capital Lima", shown(GERMANY, PERU)),
            ),
            (
                "<think> Lima is the capital of Peru. I need the continent of Peru."
                "</think><search> continent of Peru</search>",
                ("continent of Peru", shown(PERU)),
            ),
            (
                "<think> Peru is in South America.</think><answer> South America</answer>",
                None,
            ),
        ],
    ),
    "compare": (
        "Which has more inhabitants, Victoria in Canada or Bonn?",
        [
            (
                "<think> I need the population of Victoria in Canada.</think>"
                "<search> population of Victoria in Canada</search>",
                ("population of Victoria in Canada", shown(CANADA, TEXAS)),
            ),
            (
                "<think> Victoria: the population is 289,625. Victoria in Canada or Bonn? "
                "I need the population of Bonn."
                "</think><search> population of Bonn</search>",
                ("population of Bonn", shown(BONN)),
            ),
            (
                "<think> Bonn: the population is 313,125. Victoria has 289,625. Bonn has more."
                "</think><answer> Bonn</answer>",
                None,
            ),
        ],
    ),
    "nearest_attribute": (
        "What is the currency of the country of the major city nearest to Melk in the "
        "Europe/Vienna time zone?",
        [
            (
                "<think> I need the nearest major city of Melk in the Europe/Vienna time zone."
                "</think>"
                "<search> nearest major city of Melk in the Europe/Vienna time zone</search>",
                ("…", "Doc 1(Title: Melk) The nearest major city is Bonn, 9 km away."),
            ),
            (
                "<think> Melk: the nearest major city is Bonn. I need the country of Bonn."
                "</think><search> country of Bonn</search>",
                ("country of Bonn", shown(BONN)),
            ),
            (
                "<think> Bonn is in Germany. I need the currency of Germany.</think>"
                "<search> currency of Germany</search>",
                ("currency of Germany", shown(GERMANY)),
            ),
            ("<think> Germany: the currency is Euro.</think><answer> Euro</answer>", None),
        ],
    ),
}


@pytest.mark.parametrize("family", WALKS)
def test_act_step_by_step(family):
    question, walk = WALKS[family]
    steps = []
    for action, observed in walk:
        assert act(question, steps) == action
        steps.append(observed)
    assert steps[-1] is None  # the last one was the answer


def test_act_reads_refined_text_too():
    question = "In which country is Bonn?"
    refined = "(Title: Bonn) Bonn is a place in Germany."
    assert act(question, [("country of Bonn", refined)]).endswith("<answer> Germany</answer>")


def test_a_miss_is_tried_once_more_without_qualifier_then_given_up():
    question = "In which country is Victoria near Temuco?"
    miss = ("country of Victoria near Temuco", shown(BONN))
    assert act(question, [miss]) == (
        "<think> No document fits. I need the country of Victoria near Temuco.</think>"
        "<search> country of Victoria</search>"
    )
    assert act(question, [miss, ("country of Victoria", NOTHING_RELEVANT)]) == ""
    found = act(question, [miss, ("country of Victoria", shown(TEXAS, CHILE))])
    assert found == "<think> Victoria is in Chile.</think><answer> Chile</answer>"


def test_misses_count_hop_by_hop():
    question = "What is the currency of the country where Bonn lies?"
    steps = [("", ""), ("", shown(BONN)), ("", "")]
    assert act(question, steps).endswith("<search> currency of Germany</search>")
    assert act(question, [*steps, ("", "")]) == ""


def test_a_hasty_searcher_leaves_the_qualifier_out_first():
    question = "In which country is Victoria near Temuco?"
    bare = "<search> country of Victoria</search>"
    exact = "<search> country of Victoria near Temuco</search>"
    assert act(question, [], bare=1.0).endswith(bare)
    assert act(question, [], bare=0.0).endswith(exact)
    assert act(question, [("", "")], bare=1.0).endswith(exact)
    both = shown(TEXAS, CANADA)  # two homonyms, neither near Temuco: not told apart
    assert act(question, [("country of Victoria", both)], bare=1.0).endswith(exact)
    asked = [f"In which country is Victoria near Town{i}?" for i in range(200)]
    hasty = [act(q, [], bare=0.3).endswith(bare) for q in asked]
    assert 40 < sum(hasty) < 80  # 60 expected, standard deviation 6.5
    assert [act(q, [], bare=0.3).endswith(bare) for q in asked] == hasty  # a habit, not a draw


def test_foreign_questions_get_no_action():
    assert act("Who wrote Faust?", []) == ""


def test_the_scripted_teacher_reads_a_context_like_a_policy():
    engine = ByteEngine()
    teacher = ScriptedTeacher(engine)
    question, walk = WALKS["city_attribute"]
    context = f"<|user|>Search: {question}<|assistant|>"
    for action, observed in walk:
        (made,) = teacher.generate([engine.encode(context)], Sampling(8))
        assert engine.decode(made.ids) == action
        assert (made.finish, len(made.logprobs)) == ("stop", len(made.ids))
        if observed:
            context += f"{action}<information>{observed[1]}</information>"
    (made,) = teacher.generate([engine.encode("<|user|>Search: Hello?<|assistant|>")], Sampling(8))
    assert (made.ids, made.finish) == ((), "length")


# On the real world


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    return build_index(load_passages(GEO / "passages.jsonl"), tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def evaluation():
    return [q for h in ("single", "multi") for q in load_questions(GEO / f"eval_{h}.jsonl")]


@pytest.mark.parametrize("refine", [keep_all, OracleRefiner()], ids=["raw", "oracle"])
def test_the_teacher_answers_real_questions_through_the_one_rollout(refine, search, evaluation):
    method = Method(form="short", budget=6)
    done = rollout(evaluation, ScriptedTeacher(ByteEngine()), search, refine, method, Sampling(72))
    right = [t for t in done if t.prediction == t.question.answers[0]]
    assert len(right) / len(done) >= 0.85
    assert {t.end for t in done} == {"answer", "invalid"}
    assert all(t.searches >= t.question.hops for t in right if t.question.family != "compare")
    for family in {q.family for q in evaluation}:  # every family is understood
        share = [t.prediction in t.question.answers for t in done if t.question.family == family]
        assert sum(share) / len(share) > 0.6, family
    refined = [(turn.observation, turn.passages) for t in done for turn in t.turns if turn.query]
    assert len(refined) > 900
    assert all(lexical_containment(refined))
