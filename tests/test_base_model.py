"""The base model's recipe: dealt worlds, what is a target, the copying start, the optimizer."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

GEO = Path(__file__).resolve().parents[1] / "data" / "geo"
sys.path.insert(0, str(GEO))

import curriculum  # noqa: E402
import make_base_model as recipe  # noqa: E402

from crrl_lib.engine import HFEngine, load_tokenizer  # noqa: E402
from crrl_lib.geo import read_passage, write_passage  # noqa: E402
from crrl_lib.retriever import build_index  # noqa: E402


@pytest.fixture(autouse=True)
def threads():
    """Keep the trainer's choice of threads out of other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def entities():
    return curriculum.training_entities()


@pytest.fixture(scope="module")
def world(entities):
    return curriculum.deal(entities, random.Random(3))


@pytest.fixture(scope="module")
def lessons(world, tmp_path_factory):
    if not (GEO / "base").is_dir():
        pytest.skip("data/geo/base is not there: make base-model")
    search = build_index(world.passages(), tmp_path_factory.mktemp("index"))
    engine = HFEngine(recipe.make_model(), load_tokenizer(GEO / "base"))
    return curriculum.Lessons(world, search, engine, random.Random(5))


# Worlds


def test_no_entity_of_tuning_or_evaluation_is_learned_from(entities):
    split = json.loads((GEO / "splits.json").read_text())
    by_id = {e.id: e for e in entities}
    countries = {e.name: e.id for e in entities if e.kind == "country"}
    for e in by_id.values():
        home = e.id if e.kind == "country" else countries[e.facts["country"]]
        assert split[home] in ("train", "distill")
    assert len(by_id) > 2000


def test_a_dealt_world_reads_back_as_dealt(world):
    for e in world.entities.values():
        p = write_passage(e)
        facts = read_passage(p.title, p.text).facts
        assert facts.items() <= e.facts.items()
        assert len(facts) >= 6


def test_dealing_keeps_homonyms_and_replaces_most_names_and_facts(entities, world):
    was = {e.id: e for e in entities}
    new = [e for e in world.entities.values() if e.name != was[e.id].name]
    assert 0.5 < len(new) / len(was) < 0.7
    for e in list(world.entities.values())[:300]:
        kin = [o.id for o in entities if o.name == was[e.id].name]
        assert {world.entities[i].name for i in kin} == {e.name}
    cities = [e for e in world.entities.values() if e.kind == "city"]
    kept = sum(e.facts["country"] == was[e.id].facts["country"] for e in cities)
    assert kept < 0.05 * len(cities)


def test_a_seed_deals_the_same_world_again(entities, world):
    assert curriculum.deal(entities, random.Random(3)).passages() == world.passages()
    assert curriculum.deal(entities, random.Random(4)).passages() != world.passages()


# Lessons


def test_actions_are_full_targets_and_contexts_light_ones(lessons):
    examples = list(lessons.episodes(30))
    assert len(examples) > 30
    decode = lessons.engine.decode
    for ids, weights in examples:
        assert set(weights) == {curriculum.CONTEXT_WEIGHT, 1.0}
        assert len(ids) == len(weights)
        runs, last = [], 0.0
        for token, weight in zip(ids, weights, strict=True):
            if weight == 1.0:
                runs.append([]) if last != 1.0 else None
                runs[-1].append(token)
            last = weight
        for text in map(decode, runs):  # an action, a refinement or a forced answer, nothing else
            written = text.strip()
            assert written.endswith(("</search>", "</answer>", "<|end|>"))
            assert "<information>" not in written
            assert "<|user|>" not in written


def test_readings_answer_every_query_from_the_documents_shown(lessons):
    for ids, _ in list(lessons.readings(20, 3, 0.3)):
        text = lessons.engine.decode(ids)
        documents, _, lookups = text.partition("</information>")
        for fact in lookups.split("<think>")[1:]:
            said = fact.split(".</think>")[0]
            assert re.split(r": the .+? is | is the capital of | is in ", said)[1] in documents


def test_batches_hold_every_example_at_about_their_size():
    rng = random.Random(0)
    examples = [([rng.randint(1, 9)] * n, [1.0] * n) for n in rng.choices(range(5, 300), k=200)]
    made = list(recipe.batches(examples, random.Random(1), 250))
    assert all(ids.numel() <= 1.1 * recipe.BATCH_TOKENS for ids, _ in made)
    assert all((weights[ids == 0] == 0).all() for ids, weights in made)
    rows = [r[r > 0].tolist() for ids, _ in made for r in ids]
    assert sorted(rows) == sorted(i for i, _ in examples if len(i) <= 250)


# Model and optimizer


def log_probs_of_a_second_reading(model) -> torch.Tensor:
    once = torch.randint(50, recipe.VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([once, once], dim=1)
    with torch.no_grad():
        logits = model(ids).logits[:, 40:-1]
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, 41:].flatten(), reduction="none")


def test_the_start_copies_what_was_read_before():
    torch.manual_seed(0)
    model = recipe.make_model().eval()
    plain = log_probs_of_a_second_reading(model)
    recipe.start_as_copier(model)
    started = log_probs_of_a_second_reading(model)
    assert started.mean() > plain.mean() + 1
    assert (started > plain).float().mean() > 0.8


def test_a_step_follows_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    model = recipe.make_model()
    ids = torch.randint(50, recipe.VOCABULARY, (5, 30))
    weights = torch.ones(5, 30)  # all of them full targets: none is left out by chance
    weights[3, 17:] = 0.0
    logits = model(ids).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    grads = torch.autograd.grad((losses * w).sum() / w.sum(), list(model.parameters()))
    norm = torch.stack([g.norm() for g in grads]).norm()
    got, kept = recipe.Trainer(model, 0.0, 0.0).step(ids, weights, 1.0)
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g / max(1.0, norm), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got, losses[w > 0])
    assert kept.tolist() == [1.0] * int(w.sum())


def test_context_targets_keep_their_weight_on_average():
    torch.manual_seed(0)
    model = recipe.make_model()
    weights = torch.full((4, 200), 0.1)
    _, kept = recipe.Trainer(model, 0.0, 0.0).step(torch.ones(4, 200).long(), weights, 1.0)
    assert kept.unique().tolist() == pytest.approx([0.4])
    assert kept.sum().item() == pytest.approx(0.1 * 4 * 199, rel=0.25)


@pytest.mark.parametrize("shape", [(3, 20, 50), (3, 50, 20), (2, 30, 30)])
def test_muon_brings_singular_values_near_one(shape):
    g = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    made = recipe.Muon.orthogonal(g)
    values = torch.linalg.svdvals(made)
    assert values.max() < 1.3
    assert values.min() > (0.3 if shape[1] == shape[2] else 0.6)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    assert ((u.mT @ made @ vh.mT).diagonal(dim1=1, dim2=2) > 0.25).all()  # the same directions
    alone = torch.cat([recipe.Muon.orthogonal(one[None]) for one in g])
    torch.testing.assert_close(made, alone)
