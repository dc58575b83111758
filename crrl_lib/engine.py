"""Engines: a language model behind token ids. Hugging Face here, with left-padded batches."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from crrl_lib.decode import decode
from crrl_lib.records import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


BEAT = 1_000_003  # between the seeds of two batches: no rollout has as many turns
TAIL = 16  # last tokens in which a stop tag of several tokens is looked for


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer; a bare ``tokenizer.json`` keeps its own pre-tokenizer beside any config."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    own = Path(path) / "tokenizer_config.json"
    kind = json.loads(own.read_text()).get("tokenizer_class") if own.exists() else ""
    # AutoTokenizer would take the class of the config's model family and its pre-tokenizer with it.
    # Transformers 5 writes the second name for the first.
    generic = kind in ("PreTrainedTokenizerFast", "TokenizersBackend")
    loader = PreTrainedTokenizerFast if generic else AutoTokenizer
    return loader.from_pretrained(str(path))


def load_model(path: str | Path, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """Load a causal LM for inference or training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    return model.to(device).eval()


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Rows of like length together, the longest first, each batch of at most ``most`` tokens."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    made = []
    while order:
        size = max(1, most // lengths[order[-1]])
        made.append(order[-size:])
        order = order[:-size]
    return made


def open_engine(path: str | Path, agent: Mapping, device: str = "cpu") -> HFEngine:
    """Load model and tokenizer of ``path`` with the agent's ``dtype`` and ``batch_tokens``."""
    model = load_model(path, device, agent["dtype"])
    return HFEngine(model, load_tokenizer(path), agent["batch_tokens"])


class HFEngine:
    """A Hugging Face causal LM; it shares the model object: a trainer's update is seen at once."""

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
                f"a prompt of {longest} tokens and {sampling.max_tokens} new ones exceed the "
                f"model's window of {self.window}; lower max_tokens or K in params.yaml"
            )
        lengths = [len(p) + sampling.max_tokens for p in prompts]
        batches = list(enumerate(_batches(lengths, self.batch_tokens)))

        def work(job: tuple[int, list[int]]) -> list[Generation]:
            number, batch = job
            return self._batch([prompts[i] for i in batch], sampling, sampling.seed + BEAT * number)

        training = self.model.training
        self.model.eval()  # a policy in training must not sample with dropout
        made: dict[int, Generation] = {}
        for (_, batch), rows in zip(batches, self._each(work, batches), strict=True):
            made |= zip(batch, rows, strict=True)
        self.model.train(training)
        return [made[i] for i in range(len(prompts))]

    def _each(self, work: Callable, jobs: Sequence) -> list:
        """Do the jobs in order; on a CPU in threads that share its cores.

        Two batches side by side, a core each, beat one after the other on two cores.
        """
        cores = torch.get_num_threads()
        threads = min(cores, len(jobs))
        if self.model.device.type != "cpu" or threads < 2:
            return [work(job) for job in jobs]
        torch.set_num_threads(cores // threads)
        try:
            with ThreadPoolExecutor(threads) as pool:
                return list(pool.map(work, jobs))
        finally:
            torch.set_num_threads(cores)

    def _batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int
    ) -> list[Generation]:
        """Generate one batch; nothing of the model's own generation_config takes part."""
        generator = torch.Generator(self.model.device).manual_seed(seed)
        stops = self._single(sampling.stop)
        spelt = [tag for tag in sampling.stop if tag not in stops.values()]

        def ended(ids: list[int]) -> bool:
            if ids[-1] in self._ends or ids[-1] in stops:
                return True
            return any(tag in self.decode(ids[-TAIL:]) for tag in spelt) if spelt else False

        made = decode(self.model, prompts, sampling, generator, ended)
        return [self._read(ids, logprobs, sampling.stop, stops) for ids, logprobs in made]

    def _single(self, stop: Sequence[str]) -> dict[int, str]:
        """Stop tags that are one token of this vocabulary, by id."""
        encoded = {tag: self.encode(tag) for tag in stop}
        return {ids[0]: tag for tag, ids in encoded.items() if len(ids) == 1}

    def _read(
        self,
        ids: list[int],
        logprobs: list[float],
        stop: Sequence[str],
        single: Mapping[int, str],
    ) -> Generation:
        """Cut behind the first stop: an end token is dropped, a stop tag stays whole.

        A model may also spell a tag that has a token of its own: the text decides where it stops.
        """
        length, finish = len(ids), "length"
        if ids and (ids[-1] in self._ends or ids[-1] in single):
            length, finish = len(ids) - (ids[-1] in self._ends), "stop"

        def stopped(n: int) -> bool:
            text = self.decode(ids[:n])
            return any(tag in text for tag in stop)

        if stopped(length):
            length = bisect_left(range(length), True, key=stopped)
            finish = "stop"
        return Generation(tuple(ids[:length]), tuple(logprobs[:length]), finish)
