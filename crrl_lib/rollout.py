"""The one search loop: every method of the study and every training rollout goes through it.

All live trajectories advance together: a turn is one batched generation, one batched search over
the unique queries and one batched refinement. Nothing here is collective, so ranks that have
different amounts of work cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from crrl_lib.protocol import (
    ANSWER_OPEN,
    NOTHING_RELEVANT,
    STOP,
    information,
    neutralise,
    parse_action,
    prompt_text,
    render_passages,
)
from crrl_lib.records import (
    Engine,
    Generation,
    Passage,
    Question,
    Refine,
    RefineRequest,
    Sampling,
    Search,
    Trajectory,
    Turn,
)
from crrl_lib.views import View, context_ids


@dataclass(frozen=True)
class Method:
    """One row of the study: prompt x view x search budget; the refiner is passed beside it.

    ``prompt`` is ``search``, ``direct``, ``cot`` or ``rag`` (one retrieval of the question itself);
    ``form`` is the wording, ``paper`` or ``short``. ``invalid`` says what an invalid action does:
    ``end`` the run, or ``retry`` with a note in its place, as Search-R1 does.
    """

    prompt: str = "search"
    view: View = field(default_factory=View)
    budget: int = 8
    k: int = 3
    form: str = "paper"
    invalid: str = "end"

    def __post_init__(self) -> None:
        if self.prompt not in ("search", "direct", "cot", "rag"):
            raise ValueError(f"unknown prompt {self.prompt!r}; expected search, direct, cot or rag")
        if self.invalid not in ("end", "retry"):
            raise ValueError(f"invalid_action is {self.invalid!r}; expected 'end' or 'retry'")
        if self.k < 1 or self.budget < 0:
            raise ValueError(f"k={self.k} and budget={self.budget}; expected k >= 1, budget >= 0")


RETRY_NOTE = (
    "My action is not valid. To search, put the query between <search> and </search>; "
    "to answer, put the answer between <answer> and </answer>."
)


@dataclass
class _Live:
    """A trajectory under way."""

    question: Question
    prompt_ids: list[int]
    read: tuple[Passage, ...] = ()  # what the prompt itself holds: RAG's one retrieval
    turns: list[Turn] = field(default_factory=list)
    end: str = ""
    context: tuple[int, ...] = ()
    last_chance: str = ""  # why searching is disabled for this generation


def rollout(
    questions: Sequence[Question],
    policy: Engine,
    search: Search,
    refine: Refine,
    method: Method,
    sampling: Sampling,
) -> list[Trajectory]:
    """Run every question to its end, in order; repeat a question to sample a group of it.

    Generation stops at the first closing ``</search>`` or ``</answer>``, whatever ``sampling.stop``
    says. Once the budget is spent, or the context leaves no room for another turn, one last
    generation starts after a forced ``<answer>``: searching is disabled, nothing is truncated.
    Where an observation leaves no room even for that, the run ends without an answer (``window``).
    """
    live = _start(questions, policy, search, method)
    sampling = replace(sampling, stop=STOP)
    turn = 0
    while running := [t for t in live if not t.end]:
        for t in running:
            _prepare(t, policy, method, sampling)
        running = [t for t in running if not t.end]
        made = policy.generate(
            [t.context for t in running], replace(sampling, seed=sampling.seed + turn)
        )
        for t, generation in zip(running, made, strict=True):
            _act(t, generation, policy, method)
        _observe([t for t in running if not t.end], policy, search, refine, method)
        turn += 1
    return [Trajectory(t.question, tuple(t.turns), t.end, method.prompt) for t in live]


def _start(
    questions: Sequence[Question], policy: Engine, search: Search, method: Method
) -> list[_Live]:
    """Make each prompt; for RAG, search the questions themselves first."""
    texts = list(dict.fromkeys(q.text for q in questions))
    read: dict[str, tuple[Passage, ...]] = dict.fromkeys(texts, ())
    if method.prompt == "rag":
        read = dict(zip(texts, map(tuple, search(texts, method.k)), strict=True))
    ids = {}
    for text, passages in read.items():
        parts = {"question": neutralise(text)}
        parts["documents"] = information(render_passages(passages), "short") if passages else ""
        ids[text] = policy.chat(prompt_text(method.form, method.prompt, **parts))
    return [_Live(q, ids[q.text], read=read[q.text]) for q in questions]


def _prepare(t: _Live, policy: Engine, method: Method, sampling: Sampling) -> None:
    """Set the context of the next generation; force an answer when no search is left to make."""
    t.context = context_ids(t.prompt_ids, t.turns, method.view)
    if method.prompt != "search":
        return
    room = policy.window - len(t.context) - sampling.max_tokens
    searches = sum(bool(turn.query) for turn in t.turns)
    if searches >= method.budget:
        t.last_chance = "budget"
    elif room < sampling.max_tokens:  # the next turn would not fit
        t.last_chance = "window"
    if t.last_chance:
        t.context += tuple(policy.encode(ANSWER_OPEN))
        if t.turns and len(t.context) + sampling.max_tokens > policy.window:
            t.end = "window"


def _act(t: _Live, generation: Generation, policy: Engine, method: Method) -> None:
    """Turn one generation into the next turn, or into the end of the run."""
    text = policy.decode(generation.ids)
    forced = t.last_chance and not text.lstrip().startswith(ANSWER_OPEN)  # some write it again
    action = parse_action(ANSWER_OPEN + text if forced else text)
    turn = Turn(
        action.thought,
        passages=t.read,
        observation=render_passages(t.read),
        context_ids=t.context,
        action_ids=tuple(generation.ids),
        logprobs=tuple(generation.logprobs),
    )
    if action.kind == "answer":
        t.turns.append(replace(turn, answer=action.argument))
        t.end = t.last_chance or "answer"
    elif action.kind == "search" and method.prompt == "search" and not t.last_chance:
        thought_ids, query_ids = _cut(generation.ids, text, action.cut, policy)
        t.turns.append(
            replace(turn, query=action.argument, thought_ids=thought_ids, query_ids=query_ids)
        )
    else:
        note = action.argument if action.kind == "invalid" else "searching is disabled"
        t.turns.append(replace(turn, note=note))
        spent = len(t.turns) > method.budget
        if method.invalid == "end" or method.prompt != "search" or t.last_chance or spent:
            t.end = "invalid"


def _cut(
    ids: Sequence[int], text: str, cut: int, policy: Engine
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut an action into its thought and its query, at a token boundary where there is one.

    Where a token spans the cut, the two parts are encoded anew: they are only ever read as context,
    and what is trained on stays as sampled.
    """
    low, high = 0, len(ids)
    while low < high:  # the shortest prefix that decodes to at least the thought
        middle = (low + high) // 2
        if len(policy.decode(ids[:middle])) < cut:
            low = middle + 1
        else:
            high = middle
    if policy.decode(ids[:low]) == text[:cut]:
        return tuple(ids[:low]), tuple(ids[low:])
    return tuple(policy.encode(text[:cut])), tuple(policy.encode(text[cut:]))


def _observe(
    running: Sequence[_Live], policy: Engine, search: Search, refine: Refine, method: Method
) -> None:
    """Search the unique queries once, refine, and append what the policy will read."""
    for t in running:
        if t.turns[-1].note:
            t.turns[-1] = replace(t.turns[-1], observation_ids=tuple(policy.encode(RETRY_NOTE)))
    asking = [t for t in running if t.turns[-1].query]
    if not asking:
        return
    unique = list(dict.fromkeys(t.turns[-1].query for t in asking))
    found: dict[str, list[Passage]] = dict(zip(unique, search(unique, method.k), strict=True))
    requests = [
        RefineRequest(
            t.question,
            tuple(t.turns[:-1]),
            t.turns[-1].thought,
            t.turns[-1].query,
            tuple(found[t.turns[-1].query]),
        )
        for t in asking
    ]
    for t, request, refined in zip(asking, requests, refine(requests), strict=True):
        shown = neutralise(refined.text)
        shown = shown if shown.strip() else NOTHING_RELEVANT
        t.turns[-1] = replace(
            t.turns[-1],
            passages=request.passages,
            observation=shown,
            observation_ids=tuple(policy.encode(information(shown, method.form))),
            refiner_tokens=refined.tokens,
        )
