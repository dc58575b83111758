"""The Hugging Face engine: planted models whose every output is known, and the small base model."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from crrl_lib.engine import HFEngine, load_model, load_tokenizer, open_engine
from crrl_lib.protocol import STOP
from crrl_lib.records import Generation, Sampling

BASE = Path(__file__).resolve().parents[1] / "data" / "geo" / "base"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = (
    "<bos>{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(*special: str, merges: tuple = ()) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer where ``special`` are single tokens; called bare it adds BOS."""
    whole = ["<pad>", "<end>", "<bos>", "<|user|>", "<|assistant|>", *special]
    pieces = dict.fromkeys([*BYTES, *(a + b for a, b in merges)])
    vocab = {t: i for i, t in enumerate([*whole, *pieces])}
    inner = Tokenizer(models.BPE(vocab, list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(whole)
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )


def model_for(tok: PreTrainedTokenizerFast, seed: int = 0, **changes) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,  # far from uniform: no near ties
        "tie_word_embeddings": False,
    }
    ends = {"bos_token_id": None, "eos_token_id": tok.eos_token_id, "pad_token_id": 0}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tok), **(sizes | ends | changes))).eval()


@torch.no_grad()
def planted(
    tok: PreTrainedTokenizerFast, chain: dict[str, str | dict[str, float]]
) -> Qwen2ForCausalLM:
    """Make a model in which a token's successor hangs on that token alone, by ``chain``."""
    model = model_for(tok, hidden_size=-(-len(tok) // 4) * 4)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    size = model.config.hidden_size
    model.model.embed_tokens.weight.copy_(torch.eye(len(tok), size))
    logits = torch.full((len(tok), size), -50.0)  # next, last
    for last, after in chain.items():
        for token, share in ({after: 1.0} if isinstance(after, str) else after).items():
            logits[one(tok, token), one(tok, last)] = math.log(share)
    model.lm_head.weight.copy_(logits / math.sqrt(size))  # the norm scales one-hots by sqrt(size)
    return model


def one(tok: PreTrainedTokenizerFast, text: str) -> int:
    (token,) = tok(text, add_special_tokens=False)["input_ids"]
    return token


def spelling(*texts: str) -> dict[str, str]:
    """Chain the letters of each text one after the other."""
    return {a: b for text in texts for a, b in itertools.pairwise(text)}


def greedy(n: int, stop: tuple[str, ...] = STOP) -> Sampling:
    return Sampling(n, stop=stop)


PROMPTS = ["a", "Bonn lies on the Rhine.", "xyz" * 20, "I need", "Where? " * 9, "Chad", "..."]


@pytest.fixture(scope="module")
def plain():
    tok = tokenizer()
    return HFEngine(model_for(tok), tok)


def text_of(made: list[Generation]) -> list[tuple]:
    """Drop the log-probs, which differ in the last bit with the shape of the batch."""
    return [(g.ids, g.finish) for g in made]


# Batches


def test_a_batch_gives_what_one_at_a_time_gives(plain):
    prompts = [plain.encode(p) for p in PROMPTS]
    together = plain.generate(prompts, greedy(20))
    alone = [plain.generate([p], greedy(20))[0] for p in prompts]
    assert text_of(together) == text_of(alone)
    assert len({g.ids for g in together}) == len(prompts)  # the prompts matter
    assert {len(g.ids) for g in together} >= {20}
    backwards = plain.generate(prompts[::-1], greedy(20))
    assert text_of(backwards[::-1]) == text_of(together)


def test_batches_are_bounded_and_change_nothing(plain):
    prompts = [plain.encode(p) for p in PROMPTS]
    small = HFEngine(plain.model, plain.tokenizer, batch_tokens=90)
    shapes = []
    handle = plain.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    made = small.generate(prompts, greedy(20))
    assert text_of(made) == text_of(plain.generate(prompts, greedy(20)))
    handle.remove()
    prefills = [s for s in shapes if s[1] > 1]
    *mine, last = prefills
    assert last == (len(prompts), 63)  # everything at once
    assert all(rows * (width + 20) <= 90 or rows == 1 for rows, width in mine)
    assert sum(rows for rows, _ in mine) == len(prompts)


def test_left_padding_changes_no_log_probability(plain):
    prompts = [plain.encode(p) for p in PROMPTS]
    for prompt, made in zip(prompts, plain.generate(prompts, greedy(6)), strict=True):
        with torch.no_grad():
            logits = plain.model(torch.tensor([[*prompt, *made.ids]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(made.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=2e-5, rtol=1e-4)


def test_nothing_to_generate(plain):
    assert plain.generate([], greedy(5)) == []


# Stops


def test_a_stop_tag_of_one_token_stays_and_ends():
    tok = tokenizer(*STOP)
    engine = HFEngine(planted(tok, {"q": "u", "u": "</search>", "</search>": "z"}), tok)
    (made,) = engine.generate([engine.encode("q")], greedy(9))
    assert made == Generation(tuple(engine.encode("u</search>")), (0.0, 0.0), "stop")
    assert len(made.ids) == 2


def test_a_stop_tag_of_several_tokens_stays_and_ends():
    tok = tokenizer()
    engine = HFEngine(planted(tok, spelling("q</search>z", "zz")), tok)
    assert len(engine.encode("</search>")) == 9
    long, short = engine.generate([engine.encode("zz"), engine.encode("q")], greedy(14))
    assert engine.decode(short.ids) == "</search>"
    assert short.finish == "stop"
    assert (engine.decode(long.ids), long.finish) == ("z" * 14, "length")  # its batch goes on
    assert engine.generate([engine.encode("q")], greedy(9))[0] == short  # the last allowed token
    cut = engine.generate([engine.encode("q")], greedy(8))[0]
    assert (engine.decode(cut.ids), cut.finish) == ("</search", "length")


def test_the_token_that_completes_a_tag_stays_whole():
    tok = tokenizer(merges=((">", "Ċ"),))
    chain = spelling("q</search") | {"h": ">\n", ">\n": "z"}
    engine = HFEngine(planted(tok, chain), tok)
    (made,) = engine.generate([engine.encode("q")], greedy(14))
    assert engine.decode(made.ids) == "</search>\n"
    assert made.ids[-1] == one(tok, ">\n")
    assert made.finish == "stop"


def test_a_tag_spelt_out_beside_its_own_token_stops_too():
    tok = tokenizer(*STOP)
    chain = {"q": "<", "<": "/", "/": "a"} | spelling("answer>z", "zz")
    engine = HFEngine(planted(tok, chain), tok)
    (made,) = engine.generate([engine.encode("q")], greedy(14))
    assert (engine.decode(made.ids), made.finish) == ("</answer>", "stop")
    assert len(made.ids) == 9


def test_only_the_stops_that_were_asked_for():
    tok = tokenizer()
    engine = HFEngine(planted(tok, spelling("q</search>z", "zz")), tok)
    (made,) = engine.generate([engine.encode("q")], greedy(11, stop=("</answer>",)))
    assert (engine.decode(made.ids), made.finish) == ("</search>zz", "length")


def test_a_tag_in_the_prompt_stops_nothing():
    tok = tokenizer()
    engine = HFEngine(planted(tok, spelling("q</search>z", "zz")), tok)
    (made,) = engine.generate([engine.encode("q</search>")], greedy(4))
    assert (engine.decode(made.ids), made.finish) == ("zzzz", "length")


def test_end_tokens_are_dropped():
    tok = tokenizer()
    engine = HFEngine(planted(tok, {"q": "u", "u": "<end>", "<end>": "z", "z": "z"}), tok)
    one_end, none = engine.generate([engine.encode("q"), engine.encode("z")], greedy(5))
    assert one_end == Generation(tuple(engine.encode("u")), (0.0,), "stop")
    assert (engine.decode(none.ids), none.finish) == ("zzzzz", "length")
    (at_once,) = engine.generate([engine.encode("u")], greedy(5))
    assert at_once == Generation((), (), "stop")


def test_every_end_token_of_the_model_counts():
    tok = tokenizer("<turn>")
    model = planted(tok, {"q": "<turn>", "<turn>": "z"})
    model.generation_config.eos_token_id = [one(tok, "<end>"), one(tok, "<turn>")]
    engine = HFEngine(model, tok)
    assert engine.generate([engine.encode("q")], greedy(5)) == [Generation((), (), "stop")]


# Sampling


COIN = {"p": {"a": 0.7, "b": 0.2, "c": 0.1}} | {x: {"a": 0.5, "b": 0.5} for x in "abc"}


@pytest.fixture(scope="module")
def coin():
    tok = tokenizer()
    return HFEngine(planted(tok, COIN), tok)


def shares(engine: HFEngine, sampling: Sampling, n: int = 4000) -> dict[str, float]:
    made = engine.generate([engine.encode("p")] * n, sampling)
    return {t: c / n for t, c in Counter(engine.decode(g.ids) for g in made).items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_is_applied(coin, temperature):
    weights = {t: p ** (1 / temperature) for t, p in COIN["p"].items()}
    found = shares(coin, Sampling(1, temperature))
    for token, weight in weights.items():
        p = weight / sum(weights.values())
        assert found[token] == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))
    assert set(found) == {"a", "b", "c"}


def test_top_p_cuts_the_tail(coin):
    found = shares(coin, Sampling(1, 1.0, top_p=0.85))
    assert set(found) == {"a", "b"}  # .7 + .2 is the least that reaches .85
    assert found["a"] == pytest.approx(7 / 9, abs=0.03)
    assert set(shares(coin, Sampling(1, 1.0, top_p=0.5), 50)) == {"a"}


def test_sampling_hangs_on_the_seed_alone(coin):
    prompts = [coin.encode("p")] * 8
    first = coin.generate(prompts, Sampling(30, 1.0, seed=3))
    torch.rand(5)  # the global generator has no say
    assert coin.generate(prompts, Sampling(30, 1.0, seed=3)) == first
    assert coin.generate(prompts, Sampling(30, 1.0, seed=4)) != first
    assert len({g.ids for g in first}) == 8  # a group of one question is eight draws


def test_sampling_leaves_the_global_generator_alone(coin):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    coin.generate([coin.encode("p")], Sampling(3, 1.0, seed=5))
    assert torch.equal(torch.rand(3), expected)


def test_the_batches_of_one_call_draw_different_noise(coin):
    small = HFEngine(coin.model, coin.tokenizer, batch_tokens=2 * 31)
    made = small.generate([coin.encode("p")] * 8, Sampling(30, 1.0, seed=3))
    assert len({g.ids for g in made}) == 8


@pytest.mark.parametrize("sampling", [greedy(12), Sampling(12, 1.0, seed=3)])
def test_threads_change_nothing(plain, sampling):
    small = HFEngine(plain.model, plain.tokenizer, batch_tokens=60)
    prompts, cores = [plain.encode(p) for p in PROMPTS], torch.get_num_threads()
    made = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made.append(text_of(small.generate(prompts, sampling)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(cores)
    assert made[0] == made[1]


def test_batches_run_side_by_side(plain, monkeypatch):
    small, meet = HFEngine(plain.model, plain.tokenizer, batch_tokens=60), threading.Barrier(2)
    whole = small._batch
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(small, "_batch", lambda *a: (meet.wait(60), whole(*a))[1])
    prompts = [plain.encode(p) for p in PROMPTS[:2]]
    assert text_of(small.generate(prompts, greedy(12))) == text_of(
        plain.generate(prompts, greedy(12))
    )


def test_a_failing_batch_leaves_the_threads_as_they_were(plain, monkeypatch):
    small, cores = HFEngine(plain.model, plain.tokenizer, batch_tokens=60), torch.get_num_threads()

    def fail(*args):
        raise MemoryError("planted")

    monkeypatch.setattr(small, "_batch", fail)
    try:
        torch.set_num_threads(2)
        with pytest.raises(MemoryError, match="planted"):
            small.generate([plain.encode(p) for p in PROMPTS], greedy(12))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(cores)


# What the model brings along


def test_the_models_own_generation_config_does_not_leak():
    tok = tokenizer()
    model = planted(tok, COIN | spelling("xx"))
    engine = HFEngine(model, tok)
    prompts = [engine.encode(p) for p in ("x", "p", "a")]
    before = [engine.generate(prompts, s) for s in (greedy(6), Sampling(6, 1.5, seed=1))]
    assert engine.decode(before[0][0].ids) == "xxxxxx"
    own = model.generation_config
    own.update(
        repetition_penalty=9.0,
        top_k=1,
        top_p=0.1,
        temperature=0.01,
        do_sample=True,
        no_repeat_ngram_size=1,
        suppress_tokens=[one(tok, "x"), one(tok, "a")],
        min_length=50,
        forced_eos_token_id=one(tok, "c"),
    )
    after = [engine.generate(prompts, s) for s in (greedy(6), Sampling(6, 1.5, seed=1))]
    assert after == before
    assert model.generation_config is own  # what a checkpoint saves is as it was
    assert own.repetition_penalty == 9.0


def test_a_model_in_training_generates_without_dropout(plain):
    tok = plain.tokenizer
    model = model_for(tok, attention_dropout=0.9)
    engine = HFEngine(model, tok)
    prompts = [engine.encode(p) for p in PROMPTS]
    calm = engine.generate(prompts, greedy(12))
    model.train()
    assert engine.generate(prompts, greedy(12)) == calm
    assert model.training and model.model.layers[0].training
    assert model(torch.tensor([prompts[0]])).logits.requires_grad


def test_an_update_of_the_model_is_seen_at_once():
    tok = tokenizer()
    model = planted(tok, spelling("ab"))
    engine = HFEngine(model, tok)
    assert engine.decode(engine.generate([engine.encode("a")], greedy(1))[0].ids) == "b"
    model.load_state_dict(planted(tok, spelling("ac")).state_dict())
    assert engine.decode(engine.generate([engine.encode("a")], greedy(1))[0].ids) == "c"


def test_a_prompt_that_does_not_fit_is_refused(plain):
    fits = plain.encode("x" * 246)
    assert len(plain.generate([fits], greedy(10))) == 1
    with pytest.raises(
        ValueError, match="247 tokens and 10 new ones exceed.* 256; lower max_tokens"
    ):
        plain.generate([plain.encode("y"), plain.encode("x" * 247)], greedy(10))


# Texts and ids


def test_encode_adds_nothing_and_decode_keeps_everything(plain):
    text = " <search>Köln , 3.5 km ?</search> <|user|>"
    assert plain.decode(plain.encode(text)) == text
    assert plain.tokenizer("a")["input_ids"][0] == one(plain.tokenizer, "<bos>")  # it would add one
    assert plain.encode("a") == [one(plain.tokenizer, "a")]


def test_the_chat_template_is_applied_once_with_one_bos(plain):
    ids = plain.chat("Search: Where is Bonn?")
    assert plain.decode(ids) == "<bos><|user|>Search: Where is Bonn?<|assistant|>"
    assert ids.count(one(plain.tokenizer, "<bos>")) == 1
    assert ids.count(one(plain.tokenizer, "<|user|>")) == 1


def test_a_saved_folder_opens_with_its_own_pre_tokenizer(tmp_path, plain):
    inner = plain.tokenizer.backend_tokenizer
    inner = Tokenizer.from_str(inner.to_str())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    own = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    )
    own.save_pretrained(tmp_path)
    plain.model.to(torch.float32).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"
    loaded = load_tokenizer(tmp_path)
    assert loaded.backend_tokenizer.pre_tokenizer.__getstate__() == (
        inner.pre_tokenizer.__getstate__()
    )
    for text in ("+49 and .de", "82,927,922 people", " It's 3.5 km  away.\n", "<|user|>x"):
        assert loaded(text)["input_ids"] == own(text)["input_ids"]
    engine = open_engine(tmp_path, {"dtype": "float32", "batch_tokens": 4096})
    prompts = [plain.encode(p) for p in PROMPTS]
    assert text_of(engine.generate(prompts, greedy(8))) == text_of(
        plain.generate(prompts, greedy(8))
    )
    assert (engine.window, engine.batch_tokens) == (256, 4096)
    assert load_model(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


# The small base model


@pytest.mark.skipif(not (BASE / "config.json").exists(), reason="data/geo/base is not made yet")
def test_the_base_model_generates_alike_alone_and_in_a_batch():
    engine = open_engine(BASE, {"dtype": "float32", "batch_tokens": 65_536})
    assert all(len(engine.encode(tag)) == 1 for tag in STOP)
    rows = (BASE.parent / "eval_multi.jsonl").read_text().splitlines()[::25]
    prompts = [engine.chat("Search: " + json.loads(row)["question"]) for row in rows]
    together = engine.generate(prompts, greedy(72))
    alone = [engine.generate([p], greedy(72))[0] for p in prompts]
    assert text_of(together) == text_of(alone)
    ends = [engine.decode(g.ids).endswith("</search>") for g in together]
    assert sum(ends) / len(ends) > 0.8  # it knows the protocol
