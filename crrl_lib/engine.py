"""Engines: a language model behind token ids. Hugging Face here, with left-padded batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from crrl_lib.records import Generation, Sampling

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer; a bare ``tokenizer.json`` beside a known config keeps its own pre-tokenizer."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    own = Path(path) / "tokenizer_config.json"
    generic = own.exists() and '"PreTrainedTokenizerFast"' in own.read_text()
    # AutoTokenizer would take the class of the config's model family and its pre-tokenizer with it.
    loader = PreTrainedTokenizerFast if generic else AutoTokenizer
    return loader.from_pretrained(str(path))


def load_model(path: str | Path, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """Load a causal LM for inference or training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    return model.to(device).eval()


def open_engine(path: str | Path, agent: Mapping, device: str = "cpu") -> HFEngine:
    """Load model and tokenizer of ``path`` with the agent's ``dtype`` and ``batch_tokens``."""
    model = load_model(path, device, agent["dtype"])
    return HFEngine(model, load_tokenizer(path), agent["batch_tokens"])


class HFEngine:
    """A Hugging Face causal LM; it shares the model object, so a trainer's update is seen at once."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_tokens: int = 32_768,
    ) -> None:
        """Bound a batch to ``batch_tokens`` tokens, prompts and new tokens together."""
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.window = int(model.config.max_position_embeddings)
        own = model.generation_config.eos_token_id
        ends = own if isinstance(own, list) else [own, tokenizer.eos_token_id]
        self._ends = {e for e in ends if e is not None}
        pad = tokenizer.pad_token_id
        self._pad = pad if pad is not None else min(self._ends)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` alone: no BOS, no template."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode, tags included, spaces as they are."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def chat(self, message: str) -> list[int]:
        """Ids of one user message under the chat template, applied exactly once."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """Generate for every prompt, batched by length so that little is padded.

        Raises when a prompt and its new tokens do not fit the window: nothing is truncated.
        """
        longest = max((len(p) for p in prompts), default=0)
        if longest + sampling.max_tokens > self.window:
            raise ValueError(
                f"a prompt of {longest} tokens and {sampling.max_tokens} new ones exceed the model's "
                f"window of {self.window}; lower max_tokens or K in params.yaml"
            )
        made: list[Generation | None] = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        while order:
            size = max(1, self.batch_tokens // (len(prompts[order[-1]]) + sampling.max_tokens))
            batch, order = order[-size:], order[:-size]
            for i, one in zip(
                batch, self._batch([prompts[i] for i in batch], sampling), strict=True
            ):
                made[i] = one
        return made

    @torch.no_grad()
    def _batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Generation]:
        """Generate one left-padded batch; rows that hit a stop are padded until the last one does."""
        device, width = self.model.device, max(len(p) for p in prompts)
        ids = torch.full((len(prompts), width), self._pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(sampling.seed)
            out = self.model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=self._config(sampling),
                **self._stopping(sampling.stop),
            )
        return [self._read(row, sampling.stop) for row in out[:, width:].tolist()]

    def _config(self, sampling: Sampling) -> GenerationConfig:
        """Spell every decoding choice out: the model's own generation_config must not add one."""
        from transformers import GenerationConfig

        greedy = sampling.temperature == 0
        return GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=not greedy,
            temperature=None if greedy else sampling.temperature,
            top_p=None if greedy else sampling.top_p,
            top_k=None if greedy else 0,
            eos_token_id=sorted(self._ends | self._single(sampling.stop).keys()),
            pad_token_id=self._pad,
            cache_implementation="static",  # a growing cache copies itself at every token
            disable_compile=True,
        )

    def _single(self, stop: Sequence[str]) -> dict[int, str]:
        """Stop tags that are one token of this vocabulary, by id."""
        encoded = {tag: self.encode(tag) for tag in stop}
        return {ids[0]: tag for tag, ids in encoded.items() if len(ids) == 1}

    def _stopping(self, stop: Sequence[str]) -> dict:
        """Stop on text where a tag is several tokens: they merge with what stands around them."""
        spelt = [tag for tag in stop if tag not in self._single(stop).values()]
        return {"stop_strings": spelt, "tokenizer": self.tokenizer} if spelt else {}

    def _read(self, row: list[int], stop: Sequence[str]) -> Generation:
        """Cut a row behind its first stop: an end token is dropped, a stop tag stays whole."""
        single = self._single(stop)
        for n, token in enumerate(row):
            if token in self._ends or token == self._pad:
                return Generation(tuple(row[:n]), (), "stop")
            if token in single:
                return Generation(tuple(row[: n + 1]), (), "stop")
        text = self.decode(row)
        return Generation(tuple(row), (), "stop" if any(t in text for t in stop) else "length")
