"""Batched decoding that drops finished rows.

``transformers.generate`` runs a batch until its slowest row stops: with actions of 20 to 70 tokens
more than half of its row-steps belong to rows that have ended. Here such rows leave the batch, keys
and values are written in place, and the log-probs of what was sampled are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from crrl_lib.records import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DROP = 0.125  # leave finished rows in until this share of the batch can go at once


class _Buffer(DynamicLayer):
    """A cache layer that writes into room taken once; a growing one copies itself every token."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.length = room, 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple:
        """Append (B, H, t, D) and return all that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, size = key_states.shape
            self.held = [s.new_empty(batch, heads, self.room, size) for s in (key_states,) * 2]
        end = self.length + key_states.shape[2]
        for held, states in zip(self.held, (key_states, value_states), strict=True):
            held[:, :, self.length : end] = states
        self.length = end
        self.keys, self.values = (held[:, :, :end] for held in self.held)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Keep some rows of the batch."""
        self.held = [held[rows] for held in self.held]


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of logits (B, V); return ids (B,) and their log-probs (B,).

    Log-probs are taken at the sampling temperature and before top-p, as training takes them;
    greedy ones at temperature 1.
    """
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        chosen = logprobs.argmax(-1)
    else:
        chosen = torch.multinomial(_nucleus(logprobs.exp(), sampling.top_p), 1, generator=generator)
        chosen = chosen[:, 0]
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of tokens that holds ``top_p``; the likeliest always stays."""
    if top_p >= 1:
        return probabilities
    ordered, order = probabilities.sort(-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    return probabilities.scatter(-1, order, ordered.masked_fill(outside, 0.0))


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
    ended: Callable[[list[int]], bool],
) -> list[tuple[list[int], list[float]]]:
    """Continue every prompt until ``ended(its new ids)`` or ``sampling.max_tokens``.

    Prompts are padded on the left; returns new ids, the ending one included, and their log-probs.
    """
    batch, limit = _Batch(model, prompts, sampling.max_tokens), sampling.max_tokens
    made: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    over = [False] * len(prompts)
    logits = batch.prefill(prompts)
    for step in range(limit):
        chosen, logprobs = sample(logits, sampling, generator)
        for row, token, logprob in zip(batch.rows, chosen.tolist(), logprobs.tolist(), strict=True):
            if not over[row]:
                made[row][0].append(token)
                made[row][1].append(logprob)
                over[row] = ended(made[row][0])
        if all(over) or step == limit - 1:
            break
        going = [i for i, row in enumerate(batch.rows) if not over[row]]
        if len(going) <= (1 - DROP) * len(batch.rows):
            chosen = chosen[batch.keep(going)]
        logits = batch.advance(chosen)
    return made


class _Batch:
    """The rows still being decoded, with their cache, mask (B, room) and positions (B,)."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int) -> None:
        self.model, self.rows = model, list(range(len(prompts)))
        self.width = max(len(p) for p in prompts)
        room = self.width + new
        self.cache = DynamicCache(config=model.config)
        for i, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:  # sliding and other layers keep their own kind
                self.cache.layers[i] = _Buffer(room)
        self.mask = torch.ones(len(prompts), room, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self.mask[row, : self.width - len(prompt)] = 0
        self.mask = self.mask.to(model.device)
        self.position = torch.tensor([len(p) - 1 for p in prompts], device=model.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read the prompts; return the logits (B, V) of the first new token."""
        ids = torch.zeros(len(prompts), self.width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, self.width - len(prompt) :] = torch.tensor(prompt)
        positions = (self.mask[:, : self.width].cumsum(-1) - 1).clamp(min=0)
        return self._forward(ids.to(self.mask.device), positions)

    def advance(self, chosen: Tensor) -> Tensor:
        """Read one more token a row; return the next logits (B, V)."""
        self.width, self.position = self.width + 1, self.position + 1
        return self._forward(chosen[:, None], self.position[:, None])

    def keep(self, going: Sequence[int]) -> Tensor:
        """Drop every other row; return the kept ones as an index."""
        index = torch.tensor(going, device=self.mask.device)
        self.rows = [self.rows[i] for i in going]
        self.mask, self.position = self.mask[index], self.position[index]
        for layer in self.cache.layers:
            layer.keep(index) if isinstance(layer, _Buffer) else layer.batch_select_indices(index)
        return index

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self.model(
            input_ids=ids,
            attention_mask=self.mask[:, : self.width],
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]
