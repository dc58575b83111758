"""The embedded world: GeoNames facts as passages and questions, and back again.

Every sentence and question comes from one table of templates, and the same table reads it back, so
the scripted teacher (``teacher.py``) sees text only, like everybody. Facts: GeoNames, CC BY 4.0.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crrl_lib.protocol import split_sentences
from crrl_lib.records import Passage, Question

# Kind, fact, wording. A kind's first fact opens the passage; the others follow in any order.
SENTENCES = (
    ("city", "country", "{name} is a city in {country}."),
    ("city", "country", "{name} is a town in {country}."),
    ("city", "country", "{name} is a place in {country}."),
    ("city", "zone", "The time zone is {zone}."),
    ("city", "zone", "Clocks follow {zone} time."),
    ("city", "population", "The population is {population}."),
    ("city", "population", "Its population is {population}."),
    ("city", "near", "The nearest major city is {near}, {km} km away."),
    ("city", "near", "The closest major city is {near}, at {km} km."),
    ("city", "place", "It lies at latitude {lat} and longitude {lon}."),
    ("country", "continent", "{name} is a country in {continent}."),
    ("country", "continent", "{name} is a state in {continent}."),
    ("country", "capital", "The capital is {capital}."),
    ("country", "capital", "Its capital is {capital}."),
    ("country", "capital", "{name}'s capital is {capital}."),
    ("country", "currency", "The currency is {currency}."),
    ("country", "currency", "Its currency is {currency}."),
    ("country", "people", "It has {people} inhabitants on {area} square kilometres."),
    ("country", "people", "{people} people live on {area} square kilometres."),
    ("country", "code", "Its calling code is {code} and its internet domain is {domain}."),
    ("country", "code", "The calling code is {code} and the internet domain is {domain}."),
    ("country", "borders", "It borders {borders}."),
    ("country", "borders", "Its neighbours include {borders}."),
)
SENTENCE_OF = {"domain": "code", "area": "people", "km": "near"}  # facts that share a sentence
# What a query calls a fact -> the fact.
ATTRIBUTES = {
    "country": "country",
    "nearest major city": "near",
    "population": "population",
    "capital": "capital",
    "currency": "currency",
    "calling code": "code",
    "internet domain": "domain",
    "continent": "continent",
}
COUNTRY_ATTRIBUTES = ("capital", "currency", "calling code", "internet domain", "continent")
# family -> wordings; {d} describes a city: a name, and what tells it from its homonyms.
QUESTIONS = {
    "country_attribute": ("What is the {a} of {n}?", "Name the {a} of {n}."),
    "city_country": ("In which country is {d}?", "Which country does {d} belong to?"),
    "city_nearest": ("Which major city is nearest to {d}?",),
    "compare": ("Which has more inhabitants, {d} or {e}?",),
    "nearest_attribute": ("What is the {a} of the country of the major city nearest to {d}?",),
    "capital_attribute": ("What is the {a} of the country whose capital is {c}?",),
    "city_attribute": (
        "What is the {a} of the country where {d} lies?",
        "Name the {a} of the country that {d} belongs to.",
    ),
}
SINGLE_HOP = ("country_attribute", "city_country", "city_nearest")
MULTI_HOP = ("city_attribute", "capital_attribute", "compare", "nearest_attribute")
HOPS = dict.fromkeys(SINGLE_HOP, 1) | dict.fromkeys(MULTI_HOP, 2) | {"nearest_attribute": 3}


@dataclass(frozen=True)
class Entity:
    """A city or a country with its facts as text; ``links`` point to other entities by id."""

    id: str
    kind: str
    name: str
    facts: Mapping[str, str]
    links: Mapping[str, str] = field(default_factory=dict)


def write_passage(entity: Entity) -> Passage:
    """Render an entity; wording and order hang on its id alone: remaking gives the same bytes."""
    key = int(hashlib.sha256(entity.id.encode()).hexdigest()[:12], 16)
    facts = dict.fromkeys(fact for kind, fact, _ in SENTENCES if kind == entity.kind)
    lines = []
    for i, fact in enumerate(facts):
        wordings = [w for _, f, w in SENTENCES if f == fact]
        wording = wordings[(key >> 3 * i) % len(wordings)]
        needed = re.findall(r"\{(\w+)\}", wording)
        if all(n == "name" or n in entity.facts for n in needed):
            lines.append(wording.format(name=entity.name, **entity.facts))
    rest = lines[1:]
    random.Random(key).shuffle(rest)
    return Passage(entity.id, entity.name, " ".join([lines[0], *rest]))


def _pattern(wording: str) -> re.Pattern[str]:
    """Turn a wording into a pattern that reads its slots back."""
    parts = re.split(r"\{(\w+)\}", wording)
    slots = [f"(?P<{p}>.+?)" if i % 2 else re.escape(p) for i, p in enumerate(parts)]
    return re.compile("".join(slots))


_READERS = [(kind, fact, _pattern(wording)) for kind, fact, wording in SENTENCES]
_QUESTION_READERS = [(family, _pattern(w)) for family, ws in QUESTIONS.items() for w in ws]


def read_sentence(sentence: str) -> tuple[str, str, dict[str, str]] | None:
    """Read one sentence back: its kind, the fact it states, its slots; None when it is foreign."""
    for kind, fact, pattern in _READERS:
        if match := pattern.fullmatch(sentence):
            return kind, fact, match.groupdict()
    return None


@dataclass(frozen=True)
class Reading:
    """What one passage says: ``facts`` by slot and the ``sentences`` that state them, by fact."""

    title: str
    kind: str
    facts: dict[str, str]
    sentences: dict[str, str]


def read_passage(title: str, text: str) -> Reading:
    """Read a passage, whole or refined, back into facts; foreign sentences are passed over."""
    facts, sentences, kind = {}, {}, ""
    for sentence in split_sentences(text):
        if found := read_sentence(sentence):
            kind, fact, slots = found
            slots.pop("name", None)
            facts |= slots
            sentences[fact] = sentence
    return Reading(title, kind, facts, sentences)


def read_question(text: str) -> tuple[str, dict[str, str]] | None:
    """Family and slots of a question of this world, or None when it is foreign."""
    for family, pattern in reversed(_QUESTION_READERS):  # the first one's {n} takes anything
        if match := pattern.fullmatch(text.strip()):
            return family, match.groupdict()
    return None


class World:
    """Entities with the look-ups that asking questions needs.

    ``askable`` limits the entities a question may name; the knowledge base keeps them all.
    """

    def __init__(self, entities: Iterable[Entity], askable: Iterable[str] | None = None) -> None:
        self.entities = {e.id: e for e in entities}
        self.askable = set(self.entities if askable is None else askable)
        self.named: dict[tuple[str, str], list[Entity]] = defaultdict(list)
        for e in self.entities.values():
            self.named[e.kind, e.name].append(e)
        asked = [e for i, e in self.entities.items() if i in self.askable]
        self.cities = [e for e in asked if e.kind == "city"]
        self.countries = [e for e in asked if e.kind == "country"]

    def passages(self) -> list[Passage]:
        """One passage an entity, in the order the entities came."""
        return [write_passage(e) for e in self.entities.values()]

    def describe(self, city: Entity, by: str, always: bool) -> tuple[str, list[str]] | None:
        """Name ``city`` so that only it is meant, with ids mentioned; None when ``by`` cannot."""
        homonyms = self.named["city", city.name]
        if len(homonyms) == 1 and not always:
            return city.name, [city.id]
        if sum(h.facts[by] == city.facts[by] for h in homonyms) > 1 or city.facts[by] == city.name:
            return None
        words = {"near": " near {}", "country": " in {}", "zone": " in the {} time zone"}
        mentioned = [city.links[by]] if by in city.links else []
        return city.name + words[by].format(city.facts[by]), [city.id, *mentioned]


def ask(world: World, family: str, rng: random.Random) -> tuple[Question, list[str]] | None:
    """Draw one question of ``family`` and the ids of every entity it involves.

    None when the draw does not give a question with one clear answer, or needs an entity that may
    not be asked about: draw again.
    """
    draw = {"compare": _ask_compare, "capital_attribute": _ask_capital}.get(family)
    made = draw(world, rng) if draw else _ask_chain(world, family, rng)
    if made is None:
        return None
    slots, answer, chain, mentioned = made
    involved = list(dict.fromkeys([*chain, *mentioned]))
    if not set(involved) <= world.askable or not answer:
        return None
    text = rng.choice(QUESTIONS[family]).format(**slots)
    titles = tuple(world.entities[i].name for i in chain)
    key = f"{family}-{hashlib.sha256(('|'.join(chain) + text).encode()).hexdigest()[:10]}"
    return Question(key, text, (answer,), family, HOPS[family], tuple(chain), titles), involved


_Draw = tuple[dict[str, str], str, list[str], list[str]] | None


def _ask_chain(world: World, family: str, rng: random.Random) -> _Draw:
    """Questions that walk from an entity to a fact: city, its nearest city, its country, a fact."""
    attribute = rng.choice(COUNTRY_ATTRIBUTES)
    if family == "country_attribute":
        n = rng.choice(world.countries)
        return {"a": attribute, "n": n.name}, n.facts.get(ATTRIBUTES[attribute], ""), [n.id], []
    city = rng.choice(world.cities)
    by = {"city_nearest": "country", "nearest_attribute": "zone"}.get(family, "near")
    described = world.describe(city, by, always=by != "near" or rng.random() < 0.3)
    if described is None:
        return None
    slots, chain = {"d": described[0], "a": attribute}, [city.id]
    if family == "city_nearest":
        return slots, city.facts["near"], chain, described[1]
    if family == "nearest_attribute":
        chain.append(city.links["near"])
        if len(world.named["city", city.facts["near"]]) > 1:
            return None  # the second hop has nothing but this name to go by
    country = world.entities[world.entities[chain[-1]].links["country"]]
    if family == "city_country":
        return slots, country.name, chain, [*described[1], country.id]
    chain.append(country.id)
    return slots, country.facts.get(ATTRIBUTES[attribute], ""), chain, described[1]


def _ask_capital(world: World, rng: random.Random) -> _Draw:
    country, attribute = rng.choice(world.countries), rng.choice(COUNTRY_ATTRIBUTES[1:])
    capital = country.facts["capital"]
    if sum(e.facts.get("capital") == capital for e in world.entities.values()) > 1:
        return None
    answer = country.facts[ATTRIBUTES[attribute]]
    return {"a": attribute, "c": capital}, answer, [country.id], []


def _ask_compare(world: World, rng: random.Random) -> _Draw:
    pair = rng.sample(world.cities, 2)
    described = [world.describe(c, "near", always=rng.random() < 0.3) for c in pair]
    sizes = [int(c.facts["population"].replace(",", "")) for c in pair]
    if None in described or pair[0].name == pair[1].name or max(sizes) < 1.5 * min(sizes):
        return None
    (d, ids), (e, others) = described
    larger = pair[sizes.index(max(sizes))].name
    return {"d": d, "e": e}, larger, [c.id for c in pair], [*ids, *others]
