"""What the small base model reads: the search protocol in worlds whose facts are dealt anew.

Names come from training countries alone (nothing of ``tune`` or ``eval``) and every attribute is
random, so a model can only succeed by reading. Names, time zones and currencies are partly
invented: a model that has met every name learns to recall names, not to copy them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from crrl_lib.geo import (
    ATTRIBUTES,
    COUNTRY_ATTRIBUTES,
    QUESTIONS,
    Entity,
    World,
    ask,
    read_passage,
)
from crrl_lib.protocol import (
    ANSWER_OPEN,
    NOTHING_RELEVANT,
    information,
    prompt_text,
    render_passages,
    split_sentences,
)
from crrl_lib.records import Engine, Passage, Question, Refined, Sampling, Search, Trajectory
from crrl_lib.refiner import keep_all
from crrl_lib.rollout import Method, rollout
from crrl_lib.teacher import ScriptedTeacher, act, look_up, oracle_text, state
from crrl_lib.views import VIEWS, View, context_ids

HERE = Path(__file__).parent
FORM = "short"
KS = (
    1,
    2,
    3,
    3,
    3,
    4,
    5,
)  # passages a search; one K alone would make another K a distribution shift
VIEW_MIX = {"full": 0.45, "o": 0.15, "oq": 0.25, "oqp": 0.15}
REFINED = 0.4  # share of episodes that read refined documents, half of them under -oq
INVENTED = (0.2, 0.6)  # share of names that are nobody's: at first, and in the last third
COUNTRIES = 0.3  # share of readings that start from a country
BARE = 0.3  # share of first queries that leave out what tells homonyms apart
Example = tuple[list[int], list[float]]  # ids and a weight for each as a target
CONTEXT_WEIGHT = 0.1  # of tokens that the model did not write itself


def training_entities(folder: Path = HERE) -> list[Entity]:
    """Read the entities of countries that neither tuning nor evaluation asks about."""
    split = json.loads((folder / "splits.json").read_text())
    rows = [json.loads(line) for line in (folder / "passages.jsonl").read_text().splitlines()]
    read = [(r["id"], read_passage(r["title"], r["text"])) for r in rows]
    ids = {reading.title: i for i, reading in read if reading.kind == "country"}
    kept = []
    for i, reading in read:
        home = i if reading.kind == "country" else ids[reading.facts["country"]]
        if split[home] in ("train", "distill"):
            kept.append(Entity(i, reading.kind, reading.title, dict(reading.facts)))
    return kept


def splice(a: str, b: str, rng: random.Random) -> str:
    """The head of one name and the tail of another."""
    return a[: rng.randint(2, max(2, len(a) - 2))] + b[rng.randint(1, max(1, len(b) - 3)) :].lower()


def invent(words: list[str], rng: random.Random) -> str:
    """A name of one to four words, most of them spliced; now and then the last one comes twice."""
    name = []
    for _ in range(rng.choices((1, 2, 3, 4), (60, 28, 9, 3))[0]):
        word = rng.choice(words)
        name.append(word if rng.random() < 0.3 else splice(word, rng.choice(words), rng))
    return " ".join(name + name[-1:] * (rng.random() < 0.06))


def deal(entities: list[Entity], rng: random.Random, invented: float = INVENTED[1]) -> World:
    """Deal every attribute anew, ``invented`` of the names too; homonyms stay homonyms."""
    names = sorted({e.name for e in entities})
    words = sorted({w for n in names for w in n.split() if re.fullmatch(r"[A-Z][^.,()]{2,}", w)})
    new = {n: invent(words, rng) if rng.random() < invented else n for n in names}
    cities = [e for e in entities if e.kind == "city"]
    countries = [e for e in entities if e.kind == "country"]
    column = {
        key: sorted({e.facts[key] for e in entities if key in e.facts})
        for key in ("zone", "continent", "currency", "domain", "code")
    }
    for i, zone in enumerate(column["zone"]):
        if rng.random() < invented:
            region = zone.split("/")[0]
            column["zone"][i] = f"{region}/{invent(words, rng).replace(' ', '_')}"
    for key in ("currency", "continent"):
        column[key] = [invent(words, rng) if rng.random() < invented else v for v in column[key]]
    size = {c.id: int(float(f"{10 ** rng.uniform(4, 7):.2g}")) for c in cities}
    major = [c for c in cities if size[c.id] >= 200_000]
    dealt = []
    for c in countries:
        facts = {
            "continent": rng.choice(column["continent"]),
            "capital": new[rng.choice(cities).name],
            "currency": rng.choice(column["currency"]),
            "people": f"{int(10 ** rng.uniform(3.5, 9)):,}",
            "area": f"{int(10 ** rng.uniform(1, 7)):,}",
            "code": f"+{rng.randint(1, 999)}" if rng.random() < 0.7 else rng.choice(column["code"]),
            "domain": "." + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=2)),
            "borders": ", ".join(new[x.name] for x in rng.sample(countries, rng.randint(1, 3))),
        }
        dealt.append(Entity(c.id, "country", new[c.name], facts))
    for c in cities:
        near, home = rng.choice(major), rng.choice(countries)
        facts = {
            "country": new[home.name],
            "zone": rng.choice(column["zone"]),
            "population": f"{size[c.id]:,}",
            "near": new[near.name],
            "km": str(rng.randint(3, 900)),
            "lat": f"{rng.uniform(-60, 70):.1f}",
            "lon": f"{rng.uniform(-180, 180):.1f}",
        }
        links = {"country": home.id, "near": near.id}
        dealt.append(Entity(c.id, "city", new[c.name], facts, links))
    return World(dealt)


@dataclass
class Lessons:
    """Examples out of one dealt world: episodes, refinements, readings, answers from memory."""

    world: World
    search: Search
    engine: Engine
    rng: random.Random

    def questions(self, n: int) -> list[Question]:
        """``n`` questions, the families in turn."""
        families, drawn = list(QUESTIONS), []
        while len(drawn) < n:
            if made := ask(self.world, families[len(drawn) % len(families)], self.rng):
                drawn.append(made[0])
        return drawn

    def episodes(self, n: int, ks: tuple[int, ...] = KS) -> Iterator[Example]:
        """Play ``n`` questions by the scripted teacher and show the right runs under many views."""
        teacher = ScriptedTeacher(self.engine, BARE)
        for k in sorted(set(ks)):
            for refined in (False, True):
                share = ks.count(k) / len(ks) * (REFINED if refined else 1 - REFINED)
                method = Method(k=k, form=FORM)
                asked = self.questions(max(1, round(n * share)))
                refine = self.noisy_oracle if refined else keep_all
                for t in rollout(asked, teacher, self.search, refine, method, Sampling(80)):
                    if t.prediction == t.question.answers[0]:
                        yield from self.show(t, refined)

    def noisy_oracle(self, requests: list) -> list[Refined]:
        """The oracle, sometimes with too much and sometimes with nothing: no refiner is perfect."""
        texts = []
        for r in requests:
            text, luck = oracle_text(r.query, r.passages), self.rng.random()
            if luck < 0.05:
                text = NOTHING_RELEVANT
            elif luck < 0.2 and text != NOTHING_RELEVANT:
                p = self.rng.choice(r.passages)
                lines = split_sentences(p.text)
                kept = self.rng.sample(lines, self.rng.randint(1, 2))
                text += f"\n(Title: {p.title}) {' '.join(kept)}"
            texts.append(Refined(text))
        return texts

    def show(self, t: Trajectory, refined: bool) -> Iterator[Example]:
        """Show one right run: its actions under a view, a refinement, a forced answer."""
        mix = {"oq": 0.5, "full": 0.3, "o": 0.1, "oqp": 0.1} if refined else VIEW_MIX
        view = VIEWS[self.rng.choices(list(mix), list(mix.values()))[0]]
        prompt = self.chat("search", question=t.question.text)
        yield from self.actions(t, view, prompt)
        searched = [turn for turn in t.turns if turn.query]
        if searched and not refined and self.rng.random() < 0.6:
            turn = self.rng.choice(searched)
            yield self.refinement(turn.query, turn.passages)
        if self.rng.random() < 0.06:
            context = context_ids(prompt, t.turns[:-1], view) + tuple(
                self.engine.encode(ANSWER_OPEN)
            )
            yield self.example(context, f" {t.prediction}</answer>")
        if self.rng.random() < 0.06:
            yield self.from_memory(t.question)
        if self.rng.random() < 0.08:
            yield self.read_at_once(t.question)

    def actions(self, t: Trajectory, view: View, prompt: list[int]) -> Iterator[Example]:
        """Actions in their contexts; contexts that extend one another make one sequence."""
        ids: list[int] = []
        weights: list[float] = []
        rows: list[Example] = []
        for i, turn in enumerate(t.turns):
            context = context_ids(prompt, t.turns[:i], view)
            if list(context[: len(ids)]) != ids or not ids:
                rows.append((ids := [], weights := []))
            weights += [CONTEXT_WEIGHT] * (len(context) - len(ids)) + [1.0] * len(turn.action_ids)
            ids += [*context[len(ids) :], *turn.action_ids]
        if len(rows) > 1 and self.rng.random() < 0.5:
            rows = rows[1:]  # the first turn looks the same under every view
        yield from rows

    def refinement(self, query: str, passages: tuple[Passage, ...]) -> Example:
        """One call of the refiner prompt, answered by the oracle."""
        parts = {"query": query, "documents": render_passages(passages)}
        return self.example(self.chat("refine", **parts), f"{oracle_text(query, passages)}<|end|>")

    def from_memory(self, q: Question) -> Example:
        """Direct or CoT: the form of an answer; its content cannot be known here."""
        if self.rng.random() < 0.5:
            return self.example(
                self.chat("direct", question=q.text), f"<answer> {q.answers[0]}</answer>"
            )
        text = f"<think> I answer from memory.</think><answer> {q.answers[0]}</answer>"
        return self.example(self.chat("cot", question=q.text), text)

    def read_at_once(self, q: Question) -> Example:
        """RAG: one retrieval of the question itself, one generation."""
        shown = information(render_passages(self.search([q.text], self.rng.choice(KS))[0]), FORM)
        action = act(q.text, [("", shown)] * q.hops)
        if ANSWER_OPEN not in action:
            action = f"<think> No document fits.</think><answer> {q.answers[0]}</answer>"
        return self.example(self.chat("rag", question=q.text, documents=shown), action)

    def chat(self, kind: str, **parts: str) -> list[int]:
        """Ids of one prompt."""
        return self.engine.chat(prompt_text(FORM, kind, **parts))

    def example(self, context: list[int] | tuple[int, ...], target: str) -> Example:
        """A context and a target as one example."""
        ids = self.engine.encode(target)
        return [*context, *ids], [CONTEXT_WEIGHT] * len(context) + [1.0] * len(ids)

    def readings(self, n: int, most: int, drop: float) -> Iterator[Example]:
        """Documents, then about eight look-ups: dense practice in finding a fact.

        At most ``most`` documents; each sentence is left out with probability ``drop``.
        """
        kinds = self.rng.choices(("country", "city"), (COUNTRIES, 1 - COUNTRIES), k=n)
        pools = {"country": self.world.countries, "city": self.world.cities}
        starts = [self.rng.choice(pools[kind]) for kind in kinds]
        found = self.search([e.name for e in starts], most)
        for start, passages in zip(starts, found, strict=True):
            count = self.rng.randint(1, most)
            own = [p for p in passages if p.id == start.id] or passages[:1]
            picked = [*own, *[p for p in passages if p.id != own[0].id]][:count]
            self.rng.shuffle(picked)
            thinned = [replace(p, text=self.thin(p.text, drop)) for p in picked]
            if lookups := self.lookups(thinned)[:8]:
                text = information(render_passages(thinned), FORM)
                ids = self.engine.encode(text)
                weights = [CONTEXT_WEIGHT] * len(ids)
                for query, fact in lookups:
                    one, w = self.example(self.engine.encode(f"<search> {query}</search>"), fact)
                    ids, weights = [*ids, *one], [*weights, *w]
                yield ids, weights

    def thin(self, text: str, drop: float) -> str:
        """Leave sentences out, never all of them."""
        lines = split_sentences(text)
        return " ".join([s for s in lines if self.rng.random() >= drop] or lines[:1])

    def lookups(self, passages: list[Passage]) -> list[tuple[str, str]]:
        """Every query with one clear answer in the passages, shuffled."""
        readings = [read_passage(p.title, p.text) for p in passages]
        made = []
        for r in readings:
            ways = [r.title]
            ways += [f"{r.title} near {r.facts['near']}"] if "near" in r.facts else []
            ways += [f"{r.title} in the {r.facts['zone']} time zone"] if "zone" in r.facts else []
            ways += [f"{r.title} in {r.facts['country']}"] if "country" in r.facts else []
            asked = COUNTRY_ATTRIBUTES if r.kind == "country" else list(ATTRIBUTES)[:3]
            for attribute in asked:
                way = self.rng.choice(ways if r.kind == "city" else ways[:1])
                if value := look_up(attribute, way, readings):
                    fact = f"<think> {state(attribute, r.title, value)}</think>"
                    made.append((f"{attribute} of {way}", fact))
            capital = r.facts.get("capital")
            if capital and (name := look_up("country with capital", capital, readings)):
                fact = state("country with capital", capital, name)
                made.append((f"country with capital {capital}", f"<think> {fact}</think>"))
        self.rng.shuffle(made)
        return made
