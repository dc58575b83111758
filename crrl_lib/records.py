"""The nouns of the study: passage, question, turn, trajectory, and what passes the three seams.

The seams are where a model, an index or a refiner is plugged in: Engine, Search, Refine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Passage:
    """One unit of the knowledge base; ``id`` is the corpus's own id, never a row number."""

    id: str
    title: str
    text: str
    score: float | None = None  # retrieval score, when it came out of a search


@dataclass(frozen=True)
class Question:
    """One question with every accepted answer and, where known, its supporting passages."""

    id: str
    text: str
    answers: tuple[str, ...]
    family: str = ""  # question type, e.g. "city_country"; free text
    hops: int = 1
    supporting_ids: tuple[str, ...] = ()
    supporting_titles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(
                f"question {self.id!r} has an empty text; every question needs one: "
                "correct or drop that row in the question file"
            )
        if not self.answers:
            raise ValueError(
                f"question {self.id!r} has no accepted answer; expected at least one in 'answers'"
            )


@dataclass(frozen=True)
class Turn:
    """One step of the agent: what it was shown, what it wrote, what came back.

    ``action_ids`` are the ids as sampled, never re-tokenised; ``thought_ids`` and ``query_ids`` are
    that action cut in two, for views that hide one of the parts.
    """

    thought: str
    query: str | None = None  # a search action
    answer: str | None = None  # an answer action; neither: invalid
    passages: tuple[Passage, ...] = ()  # as retrieved, before any refiner
    observation: str = ""  # what the policy reads between the information tags
    context_ids: tuple[int, ...] = ()
    action_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of action_ids at the sampling temperature, by the engine
    thought_ids: tuple[int, ...] = ()
    query_ids: tuple[int, ...] = ()
    observation_ids: tuple[int, ...] = ()
    refiner_tokens: int = 0  # prompt and generated tokens the refiner spent on this turn
    note: str = ""  # why an action was invalid


@dataclass(frozen=True)
class Trajectory:
    """A question and its turns; ``end`` is ``answer``, ``invalid``, ``budget`` or ``window``.

    ``budget`` and ``window`` say that searching was disabled for the last generation, because the
    searches were spent or the model's window was nearly full.
    """

    question: Question
    turns: tuple[Turn, ...] = ()
    end: str = ""
    prompt: str = ""  # name of the prompt that was used

    @property
    def prediction(self) -> str:
        """The final answer, or the empty string: a run without an answer predicts nothing."""
        return next((t.answer for t in reversed(self.turns) if t.answer is not None), "")

    @property
    def searches(self) -> int:
        """Searches that were really executed, the one of RAG included."""
        return sum(t.query is not None or bool(t.passages) for t in self.turns)

    @property
    def context_tokens(self) -> int:
        """Length of the context at the last generation, in tokens."""
        return len(self.turns[-1].context_ids) if self.turns else 0

    @property
    def context_tokens_peak(self) -> int:
        """The longest context of any generation, in tokens."""
        return max((len(t.context_ids) for t in self.turns), default=0)

    @property
    def total_tokens(self) -> int:
        """All prompt and generated tokens, the refiner's included."""
        return sum(len(t.context_ids) + len(t.action_ids) + t.refiner_tokens for t in self.turns)

    @property
    def generated_tokens(self) -> int:
        """Tokens the policy sampled: T_j of the CRRL loss."""
        return sum(len(t.action_ids) for t in self.turns)


@dataclass(frozen=True)
class Sampling:
    """How to decode. ``temperature`` 0 is greedy; generation stops at the first of ``stop``."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """What one prompt produced: sampled ids, stop tag included, and their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str  # "stop" or "length"


@dataclass(frozen=True)
class RefineRequest:
    """What a refiner may look at for one search."""

    question: Question
    turns: tuple[Turn, ...]  # before this search
    thought: str
    query: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Refined:
    """The text that becomes the observation, and what it cost."""

    text: str
    tokens: int = 0  # prompt and generated tokens spent
    kept: tuple[int, ...] = field(default=())  # indices of kept passages, for ranking refiners


class Engine(Protocol):
    """A language model behind ids: Hugging Face, vLLM, a server, or the scripted teacher."""

    window: int  # tokens of context the model can hold

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` alone: no BOS, no template."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, protocol tags included."""

    def chat(self, message: str) -> list[int]:
        """Ids of one user message under the model's chat template, up to the assistant's turn."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """One generation a prompt, in order."""


class Search(Protocol):
    """A retriever: the top ``k`` passages of each query, best first, with scores."""

    def __call__(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search every query."""


class Refine(Protocol):
    """Rewrites newly retrieved passages into the observation, a batch at a time."""

    def __call__(self, requests: Sequence[RefineRequest]) -> list[Refined]:
        """Refine every request, in order."""
