"""Contexts of three turns, id by id."""

from __future__ import annotations

import pytest

from crrl_lib.records import Turn
from crrl_lib.views import VIEWS, View, context_ids, view_by_name

PROMPT = (1, 2)
# thought 10x, query 20x, observation 30x
TURNS = [
    Turn(
        "t",
        query="q",
        thought_ids=(101,),
        query_ids=(201, 202),
        action_ids=(101, 201, 202),
        observation_ids=(301,),
    ),
    Turn(
        "t",
        query="q",
        thought_ids=(102, 103),
        query_ids=(203,),
        action_ids=(102, 103, 203),
        observation_ids=(302, 303),
    ),
    Turn(
        "t",
        query="q",
        thought_ids=(104,),
        query_ids=(204,),
        action_ids=(104, 204),
        observation_ids=(304,),
    ),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", (1, 2, 101, 201, 202, 301, 102, 103, 203, 302, 303, 104, 204, 304)),
        ("o", (1, 2, 101, 201, 202, 102, 103, 203, 104, 204, 304)),
        ("oq", (1, 2, 101, 102, 103, 104, 204, 304)),
        ("oqp", (1, 2, 104, 204, 304)),
    ],
)
def test_three_turns(name, expected):
    assert context_ids(PROMPT, TURNS, view_by_name(name)) == expected


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View(queries=False), (1, 2, 101, 301, 102, 103, 302, 303, 104, 204, 304)),
        (View(thoughts=False), (1, 2, 201, 202, 301, 203, 302, 303, 104, 204, 304)),
        (View(thoughts=False, queries=False), (1, 2, 301, 302, 303, 104, 204, 304)),
        (View(documents=False, thoughts=False), (1, 2, 201, 202, 203, 104, 204, 304)),
    ],
)
def test_each_switch_alone(view, expected):
    assert context_ids(PROMPT, TURNS, view) == expected


@pytest.mark.parametrize("name", VIEWS)
def test_before_any_turn_and_after_one_all_views_agree(name):
    assert context_ids(PROMPT, [], VIEWS[name]) == PROMPT
    first = (1, 2, 101, 201, 202, 301)
    assert context_ids(list(PROMPT), TURNS[:1], VIEWS[name]) == first


def test_full_view_only_ever_extends():
    contexts = [context_ids(PROMPT, TURNS[:n], VIEWS["full"]) for n in range(4)]
    for turn, before, after in zip(TURNS, contexts[:-1], contexts[1:], strict=True):
        assert after == before + turn.action_ids + turn.observation_ids


def test_crrl_context_is_not_an_extension():
    before, after = (context_ids(PROMPT, TURNS[:n], VIEWS["oq"]) for n in (1, 2))
    assert after[: len(before)] != before


def test_a_whole_action_is_joined_as_sampled():
    """Its parts may be cut otherwise: what was sampled across the cut is never split."""
    merged = Turn("t", query="q", thought_ids=(7,), query_ids=(8,), action_ids=(78,))
    for name in ("full", "o"):
        assert context_ids((), [merged, merged], VIEWS[name]) == (78, 78)
    assert context_ids((), [merged, merged], VIEWS["oq"]) == (7, 78)


def test_unknown_view():
    with pytest.raises(ValueError, match="unknown view 'oqx'; expected one of full, o, oq, oqp"):
        view_by_name("oqx")
