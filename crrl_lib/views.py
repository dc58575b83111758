"""Views: what of its own past the policy sees (RQ 1). The latest turn is always whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crrl_lib.records import Turn


@dataclass(frozen=True)
class View:
    """Three switches: keep the documents, the queries, the thoughts of earlier turns."""

    documents: bool = True
    queries: bool = True
    thoughts: bool = True


VIEWS = {
    "full": View(),  # IRCoT
    "o": View(documents=False),  # IRCoT-o
    "oq": View(documents=False, queries=False),  # IRCoT-oq, and CRRL's context
    "oqp": View(documents=False, queries=False, thoughts=False),  # IRCoT-oqp
}


def view_by_name(name: str) -> View:
    """Look a view up; raise with the known names when there is none."""
    if name not in VIEWS:
        raise ValueError(f"unknown view {name!r}; expected one of {', '.join(VIEWS)}")
    return VIEWS[name]


def context_ids(prompt_ids: Sequence[int], turns: Sequence[Turn], view: View) -> tuple[int, ...]:
    """Join the prompt and what ``view`` leaves of ``turns`` into the ids of the next context.

    An action that stays whole is joined as it was sampled, so under the full view every context is
    an exact extension of the one before. A hidden part leaves nothing behind, no empty tags.
    """
    ids = list(prompt_ids)
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        thought, query = last or view.thoughts, last or view.queries
        if thought and query:
            ids += turn.action_ids
        elif thought:
            ids += turn.thought_ids
        elif query:
            ids += turn.query_ids
        if last or view.documents:
            ids += turn.observation_ids
    return tuple(ids)
