"""Our decoding against ``transformers.generate``, the reference, on tiny random models."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from crrl_lib.decode import decode, sample
from crrl_lib.records import Sampling

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PROMPTS = [[5, 9, 33], [7], list(range(3, 40)), [2, 2, 2, 2, 60, 1], [11] * 15, [58, 3]]


@pytest.fixture(params=["qwen2", "llama", "sliding"])
def model(request):
    torch.manual_seed(0)
    if request.param == "llama":
        made = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        extra = sliding if request.param == "sliding" else {}
        made = Qwen2ForCausalLM(Qwen2Config(**SIZES, **extra))
    with torch.no_grad():  # a fresh model is nearly indifferent: make its choices clear
        made.lm_head.weight.mul_(20)
    return made.eval()


def reference(model, prompt: list[int], limit: int, end: int) -> list[int]:
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, eos_token_id=end, pad_token_id=0
    )
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()


def greedy(model, prompts, limit: int, end: int):
    generator = torch.Generator().manual_seed(0)
    return decode(model, prompts, Sampling(limit), generator, lambda ids: ids[-1] == end)


def test_greedy_ids_are_those_of_transformers(model):
    free = [reference(model, p, 24, 0) for p in PROMPTS]
    made = greedy(model, PROMPTS, 24, 0)
    assert [ids for ids, _ in made] == free


def test_rows_that_end_leave_and_change_nothing_for_the_others(model):
    free = [ids for ids, _ in greedy(model, PROMPTS, 24, -1)]
    end = free[0][4]  # ends some rows early, others late or never
    widths = []
    handle = model.register_forward_pre_hook(
        lambda _, __, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    made = [ids for ids, _ in greedy(model, PROMPTS, 24, end)]
    handle.remove()
    cut = [ids[: ids.index(end) + 1] if end in ids else ids for ids in free]
    assert made == cut
    assert len({len(ids) for ids in made}) > 1
    assert widths[0] == len(PROMPTS) > widths[-1]
    assert widths == sorted(widths, reverse=True)


def test_log_probs_are_those_of_one_forward(model):
    for prompt, (ids, logprobs) in zip(PROMPTS, greedy(model, PROMPTS, 12, -1), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-3)


def test_sampled_log_probs_are_at_the_temperature_and_before_top_p():
    logits = torch.tensor([[2.0, 0.0, -1.0, -9.0]]).repeat(4000, 1)
    sampling = Sampling(1, temperature=0.5, top_p=0.9)
    ids, logprobs = sample(logits, sampling, torch.Generator().manual_seed(1))
    expected = (logits / 0.5).log_softmax(-1)  # .981, .018, .002, 0: top-p keeps the first
    assert set(ids.tolist()) == {0}
    torch.testing.assert_close(logprobs, expected[:, 0])
    warm, _ = sample(logits, Sampling(1, temperature=2.0), torch.Generator().manual_seed(1))
    shares = torch.bincount(warm, minlength=4) / len(warm)
    torch.testing.assert_close(shares, (logits[0] / 2).softmax(-1), atol=0.025, rtol=0)
