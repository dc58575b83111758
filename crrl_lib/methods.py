"""The study as one table: a method is a row (prompt, view, refiner, policy), not another loop.

Adding a method is adding a row here and its name to ``params.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crrl_lib.records import Engine, Question, Refine, Sampling, Search, Trajectory
from crrl_lib.rollout import Method, rollout
from crrl_lib.views import view_by_name


@dataclass(frozen=True)
class Row:
    """One method: names of a prompt, a view, a refiner and a policy."""

    prompt: str = "search"
    view: str = "full"
    refiner: str = "none"
    policy: str = "base"


METHODS = {
    # RQ 1: what of its own past does the policy see?
    "direct": Row(prompt="direct"),
    "cot": Row(prompt="cot"),
    "rag": Row(prompt="rag"),  # one retrieval of the question itself; not in the paper
    "ircot": Row(),
    "ircot_o": Row(view="o"),
    "ircot_oq": Row(view="oq"),
    "ircot_oqp": Row(view="oqp"),
    # RQ 2: what is done to the newest documents? Full view as in Table 2, -oq as in CRRL.
    "self_refine": Row(refiner="self"),
    "self_refine_oq": Row(refiner="self", view="oq"),
    "oracle_refine": Row(refiner="oracle"),
    "oracle_refine_oq": Row(refiner="oracle", view="oq"),
    "context_refiner": Row(refiner="context"),
    "context_refiner_oq": Row(refiner="context", view="oq"),  # where CRRL starts
    # RQ 3: training on raw growing contexts, or on refined ones.
    "search_grpo": Row(policy="search_grpo"),
    "crrl": Row(refiner="context", view="oq", policy="crrl"),
}


def choose(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Look ``name`` up; raise with the known names when there is none."""
    if name not in known:
        raise ValueError(
            f"unknown {kind} {name!r}; expected one of {', '.join(known)}: see params.yaml"
        )
    return known[name]


def method_by_name(name: str) -> Row:
    """Look a method up; raise with the known names when there is none."""
    return choose("method", name, METHODS)


def start_of(row: Row) -> str | None:
    """Name the method that is ``row`` before any training; None when the table has none."""
    return next((n for n, r in METHODS.items() if r == replace(row, policy="base")), None)


def setting(row: Row, agent: Mapping) -> Method:
    """Join a row with the agent's shared params (k, budget, form, invalid_action)."""
    return Method(
        prompt=row.prompt,
        view=view_by_name(row.view),
        budget=agent["budget"],
        k=agent["k"],
        form=agent["form"],
        invalid=agent["invalid_action"],
    )


def run(
    row: Row,
    questions: Sequence[Question],
    policies: Mapping[str, Engine],
    search: Search,
    refiners: Mapping[str, Refine],
    agent: Mapping,
    seed: int = 0,
) -> list[Trajectory]:
    """Run one row on ``questions``: the named policy, refiner and view through the one rollout."""
    refine = choose("refiner", row.refiner, refiners)
    policy = choose("policy", row.policy, policies)
    sampling = Sampling(agent["max_tokens"], agent["temperature"], agent["top_p"], seed=seed)
    return rollout(questions, policy, search, refine, setting(row, agent), sampling)
