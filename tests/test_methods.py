"""The table of methods: every row that the study names, and clear words for what is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from crrl_lib.methods import METHODS, Row, method_by_name, run, setting, start_of
from crrl_lib.records import Generation, Passage, Question
from crrl_lib.refiner import keep_all
from crrl_lib.rollout import Method
from crrl_lib.views import VIEWS, View

PARAMS = Path(__file__).resolve().parents[1] / "params.yaml"
AGENT = {
    "k": 2,
    "budget": 4,
    "form": "short",
    "invalid_action": "retry",
    "max_tokens": 30,
    "temperature": 0.0,
    "top_p": 0.9,
}
ROWS = {  # prompt, view, refiner, policy, as the method's table has them
    "direct": ("direct", "full", "none", "base"),
    "cot": ("cot", "full", "none", "base"),
    "rag": ("rag", "full", "none", "base"),
    "ircot": ("search", "full", "none", "base"),
    "ircot_o": ("search", "o", "none", "base"),
    "ircot_oq": ("search", "oq", "none", "base"),
    "ircot_oqp": ("search", "oqp", "none", "base"),
    "self_refine": ("search", "full", "self", "base"),
    "self_refine_oq": ("search", "oq", "self", "base"),
    "oracle_refine": ("search", "full", "oracle", "base"),
    "oracle_refine_oq": ("search", "oq", "oracle", "base"),
    "context_refiner": ("search", "full", "context", "base"),
    "context_refiner_oq": ("search", "oq", "context", "base"),
    "search_grpo": ("search", "full", "none", "search_grpo"),
    "crrl": ("search", "oq", "context", "crrl"),
}


def test_every_method_of_the_study_has_its_row():
    assert {name: Row(*row) for name, row in ROWS.items()} == METHODS


def test_every_method_in_params_is_known():
    params = YAML(typ="safe").load(PARAMS)["method"]
    named = [m for stage in params.values() for m in stage.get("methods", [])]
    named += [stage["baseline"] for stage in params.values() if "baseline" in stage]
    assert len(named) >= 15
    assert set(named) <= set(METHODS)


def test_unknown_names_say_what_is_known():
    with pytest.raises(
        ValueError, match="unknown method 'ircott'; expected one of direct, .* crrl"
    ):
        method_by_name("ircott")
    with pytest.raises(ValueError, match="unknown view 'op'; expected one of full, o, oq, oqp"):
        setting(Row(view="op"), AGENT)
    with pytest.raises(ValueError, match="unknown prompt 'serch'; expected search, direct, cot"):
        setting(Row(prompt="serch"), AGENT)
    with pytest.raises(ValueError, match="'stop'; expected 'end' or 'retry'"):
        setting(Row(), AGENT | {"invalid_action": "stop"})
    with pytest.raises(ValueError, match="k=0 and budget=4; expected k >= 1"):
        setting(Row(), AGENT | {"k": 0})
    with pytest.raises(ValueError, match="k=2 and budget=-1"):
        setting(Row(), AGENT | {"budget": -1})


def test_setting_maps_params():
    expected = Method("search", View(False, False, True), 4, 2, "short", "retry")
    assert setting(METHODS["crrl"], AGENT) == expected
    assert setting(METHODS["cot"], AGENT | {"invalid_action": "end"}).prompt == "cot"
    assert [setting(METHODS[f"ircot_{v}"], AGENT).view for v in ("o", "oq", "oqp")] == [
        VIEWS["o"],
        VIEWS["oq"],
        VIEWS["oqp"],
    ]


class Fixed:
    """A policy that answers with its own name at once."""

    window = 10_000

    def __init__(self, name: str) -> None:
        self.name, self.samplings = name, []

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def chat(self, message):
        return self.encode(message)

    def generate(self, prompts, sampling):
        self.samplings.append(sampling)
        ids = tuple(self.encode(f"<answer>{self.name}</answer>"))
        return [Generation(ids, (), "stop") for _ in prompts]


def test_run_takes_the_rows_policy_and_the_agents_sampling():
    policies = {name: Fixed(name) for name in ("base", "crrl")}
    questions = [Question("q", "Who?", ("x",))]
    refiners = {"none": keep_all, "context": keep_all}
    search = lambda queries, k: [[Passage("p", "T", "t")]] * len(queries)  # noqa: E731
    for name, wanted in (("crrl", "crrl"), ("ircot", "base")):
        row = method_by_name(name)
        agent = AGENT | {"temperature": 0.7}
        (t,) = run(row, questions, policies, search, refiners, agent, seed=5)
        assert (t.prediction, t.prompt) == (wanted, "search")
    (sampling,) = policies["crrl"].samplings
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (30, 0.7, 5)
    assert sampling.top_p == 0.9


def test_a_trained_row_starts_as_the_method_that_is_itself_untrained():
    assert start_of(METHODS["crrl"]) == "context_refiner_oq"
    assert start_of(METHODS["search_grpo"]) == "ircot"
    assert start_of(Row(view="oq", policy="crrl")) == "ircot_oq"  # an ablation: no refiner
    assert start_of(Row(view="o", refiner="oracle")) is None


def test_run_says_which_refiner_or_policy_is_missing():
    questions = [Question("q", "Who?", ("x",))]
    with pytest.raises(ValueError, match="unknown refiner 'context'; expected one of none, oracle"):
        run(METHODS["crrl"], questions, {}, None, {"none": 0, "oracle": 0}, AGENT)
    with pytest.raises(ValueError, match="unknown policy 'search_grpo'; expected one of base"):
        run(METHODS["search_grpo"], questions, {"base": 0}, None, {"none": 0}, AGENT)
