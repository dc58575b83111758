"""The rule-based teacher of the embedded world: an oracle refiner and a scripted agent.

Both read nothing but text: the query and the passages, or the context that a policy would see.
They stand in for the GPT-4 teacher of the paper at tiny scale and are named oracle everywhere.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from crrl_lib.geo import ATTRIBUTES, SENTENCE_OF, Reading, read_passage, read_question
from crrl_lib.protocol import NOTHING_RELEVANT
from crrl_lib.records import Engine, Generation, Passage, Refined, RefineRequest, Sampling
from crrl_lib.refiner import similarity

_QUALIFIERS = ("near", "zone", "country")
_DESCRIPTION = re.compile(r"(.+?)(?: near (.+)| in the (\S+) time zone| in (.+))?")
_DOCUMENT = re.compile(r"(?:Doc \d+)?\(Title: (.+?)\) (.+)")
_STEP = re.compile(
    r"<search>\s*(?P<query>.*?)\s*</search>"
    r"(?:\s*<information>(?P<information>.*?)</information>)?",
    re.DOTALL,
)


def _closest(readings: Sequence[Reading], name: str, least: float) -> list[Reading]:
    """Return the readings titled ``name``, or else those whose title comes closest to it."""
    exact = [r for r in readings if r.title == name]
    scores = [similarity(name, r.title) for r in readings]
    best = max(scores, default=0.0)
    if exact or best < least:
        return exact
    return [r for r, s in zip(readings, scores, strict=True) if s == best]


def select(attribute: str, description: str, readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings that ``description`` can mean and that state ``attribute``."""
    name, *qualifiers = _DESCRIPTION.fullmatch(description).groups()
    stated = [r for r in readings if ATTRIBUTES[attribute] in r.facts]
    hits = _closest(stated, name, 0.15)
    for fact, value in zip(_QUALIFIERS, qualifiers, strict=True):
        if value and len(hits) > 1:
            scores = [similarity(value, r.facts.get(fact, "")) for r in hits]
            if max(scores) >= 0.3:
                hits = [r for r, s in zip(hits, scores, strict=True) if s == max(scores)]
    return hits


def oracle_text(query: str, passages: Sequence[Passage]) -> str:
    """Keep, of each passage that ``query`` can mean, the sentence that answers it.

    Several passages left (homonyms that the query does not tell apart) keep what tells them apart.
    """
    readings = [read_passage(p.title, p.text) for p in passages]
    if match := re.fullmatch(r"country with capital (.+)", query):
        countries = [r for r in readings if r.kind == "country" and "capital" in r.facts]
        scores = [similarity(match[1], r.facts["capital"]) for r in countries]
        hits = [r for r, s in zip(countries, scores, strict=True) if s > 0.3 and s == max(scores)]
        attribute = "capital"
        if not hits:
            attribute, hits = "country", select("country", match[1], readings)
    else:
        match = re.fullmatch(rf"({'|'.join(ATTRIBUTES)}) of (.+)", query)
        if not match:
            return NOTHING_RELEVANT
        attribute, hits = match[1], select(match[1], match[2], readings)
    fact = ATTRIBUTES[attribute]
    wanted = [SENTENCE_OF.get(fact, fact)]
    if len(hits) > 1 and hits[0].kind == "city":
        wanted += [q for q in ("country", "near", "zone") if q not in wanted]
    kept = [(r.title, " ".join(r.sentences[w] for w in wanted if w in r.sentences)) for r in hits]
    return "\n".join(f"(Title: {title}) {text}" for title, text in kept) or NOTHING_RELEVANT


class OracleRefiner:
    """The teacher as a refiner: rules, no model, no tokens."""

    def __call__(self, requests: Sequence[RefineRequest]) -> list[Refined]:
        """Refine each request by the rules of this world."""
        return [Refined(oracle_text(r.query, r.passages)) for r in requests]


def plan(question: str) -> list[tuple[str, str]] | None:
    """Break a question into hops (attribute, description); ``$`` stands for the value found before.

    >>> plan("What is the currency of the country where Bonn lies?")
    [('country', 'Bonn'), ('currency', '$')]
    """
    if (found := read_question(question)) is None:
        return None
    family, s = found
    return {
        "country_attribute": lambda: [(s["a"], s["n"])],
        "city_country": lambda: [("country", s["d"])],
        "city_nearest": lambda: [("nearest major city", s["d"])],
        "city_attribute": lambda: [("country", s["d"]), (s["a"], "$")],
        "capital_attribute": lambda: [("country with capital", s["c"]), (s["a"], "$")],
        "compare": lambda: [("population", s["d"]), ("population", s["e"])],
        "nearest_attribute": lambda: [
            ("nearest major city", s["d"]),
            ("country", "$"),
            (s["a"], "$"),
        ],
    }[family]()


def look_up(attribute: str, description: str, readings: Sequence[Reading]) -> str | None:
    """Return the one value that the readings give; None when they give none or several."""
    if attribute == "country with capital":
        values = {r.title for r in readings if r.facts.get("capital") == description}
    else:
        exact = [r for r in readings if r.title == _DESCRIPTION.fullmatch(description)[1]]
        values = {r.facts[ATTRIBUTES[attribute]] for r in select(attribute, description, exact)}
    return values.pop() if len(values) == 1 else None


def state(attribute: str, name: str, value: str) -> str:
    """Say in a thought what a document says, in nearly its words.

    >>> state("currency", "Peru", "Sol"), state("country", "Lima", "Peru")
    ('Peru: the currency is Sol.', 'Lima is in Peru.')
    """
    if attribute == "country with capital":
        return f"{name} is the capital of {value}."
    if attribute in ("country", "continent"):
        return f"{name} is in {value}."
    return f"{name}: the {attribute} is {value}."


def _of(attribute: str, description: str) -> str:
    joint = " " if attribute == "country with capital" else " of "
    return f"{attribute}{joint}{description}"


def _bare(description: str) -> str:
    return _DESCRIPTION.fullmatch(description)[1]


def act(question: str, steps: Sequence[tuple[str, str]], bare: float = 0.0) -> str:
    """Write the next action after ``steps``, the (query, information) pairs seen so far.

    ``bare``: share of questions whose first try leaves out what tells homonyms apart, as a hasty
    searcher would. A second miss on the same hop gives up: no action, an empty string.
    """
    hops, found, misses, thought = plan(question), [], 0, ""
    if hops is None:
        return ""
    rng = random.Random(question)  # one habit a question, the same at every call
    hasty = [rng.random() < bare for _ in hops]
    for _, information in steps:
        attribute, description = hops[len(found)]
        description = found[-1] if description == "$" else description
        readings = [read_passage(t, text) for t, text in _DOCUMENT.findall(information)]
        value = look_up(attribute, description, readings)
        misses = 0 if value else misses + 1
        thought = "No document fits. "
        if value:
            thought = state(attribute, _bare(description), value) + " "
            found.append(value)
        if len(found) == len(hops) or misses == 2:
            break
    if len(found) == len(hops):
        return _final(question, hops, found, thought)
    if misses == 2:
        return ""
    attribute, description = hops[len(found)]
    description = found[-1] if description == "$" else description
    asked = description
    if attribute in ATTRIBUTES and hasty[len(found)] != (misses == 1):
        asked = _bare(description)
    if found and read_question(question)[0] == "compare":
        thought += f"{hops[0][1]} or {description}? "
    need = f"{thought}I need the {_of(attribute, description)}."
    return f"<think> {need}</think><search> {_of(attribute, asked)}</search>"


def _final(question: str, hops: list, found: list[str], thought: str) -> str:
    answer = found[-1]
    if read_question(question)[0] == "compare":
        sizes = [int(v.replace(",", "")) for v in found]
        answer = _bare(hops[sizes.index(max(sizes))][1])
        thought += f"{_bare(hops[0][1])} has {found[0]}. {answer} has more. "
    return f"<think> {thought.strip()}</think><answer> {answer}</answer>"


class ScriptedTeacher:
    """The scripted agent behind the engine seam; it shares the tokenizer of the engine it wraps."""

    def __init__(self, engine: Engine, bare: float = 0.0) -> None:
        self.engine, self.window, self.bare = engine, engine.window, bare
        self.encode, self.decode, self.chat = engine.encode, engine.decode, engine.chat

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """Act once for each context; sampling has no meaning here."""
        return [self._generate(self.decode(list(p))) for p in prompts]

    def _generate(self, context: str) -> Generation:
        steps = [(m["query"], m["information"] or "") for m in _STEP.finditer(context)]
        head = context.split("<think>", 1)[0]
        questions = re.findall(r"[A-Z][^:]*?[?.](?=<|\s|$)", head)
        text = next((q for q in reversed(questions) if plan(q)), "")
        ids = tuple(self.encode(act(text, steps, self.bare)))
        return Generation(ids, (0.0,) * len(ids), "stop" if ids else "length")
