"""Make the small base model: ``make base-model``, under half an hour on two cores.

About 1.7 million weights, a stock Qwen2 with heads of 64 and its own BPE vocabulary. Two lessons:
dense reading of documents, then the search protocol as it is played. From a plain start the onset
of copying is sudden and unreliable; `start_as_copier` makes it quick and reliable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from curriculum import FORM, INVENTED, Example, Lessons, deal, training_entities  # noqa: E402

from crrl_lib.engine import HFEngine  # noqa: E402
from crrl_lib.geo import Entity, World  # noqa: E402
from crrl_lib.protocol import render_passages  # noqa: E402
from crrl_lib.records import Sampling  # noqa: E402
from crrl_lib.refiner import keep_all  # noqa: E402
from crrl_lib.retriever import build_index  # noqa: E402
from crrl_lib.rollout import Method, rollout  # noqa: E402

VOCABULARY = 2048
TAGS = ["think", "search", "information", "answer"]
SPECIAL = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>"]
SPECIAL += [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BATCH_TOKENS = 4096
ENOUGH = (0.5, 0.45, 0.4)  # a stage ends at this loss,
LATEST = (0.08, 0.14, 0.2)  # or at this share of all tokens


def make_tokenizer(worlds: list[World], seed: int) -> PreTrainedTokenizerFast:
    """BPE over passages and questions; digits stay single, so that numbers can be copied.

    Several worlds, so that its tokens are parts of many names and not one world's names whole.
    """
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    inner.decoder = decoders.ByteLevel()
    texts = [render_passages([p]) for world in worlds for p in world.passages()]
    lessons = Lessons(worlds[0], None, None, random.Random(seed))
    texts += [q.text for q in lessons.questions(4000)]
    texts += ["Search: Think: Answer: Read: Refine: Nothing relevant. No document fits."] * 200
    texts += ["I need the nearest major city of. I answer from memory. has more."] * 200
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def make_model() -> Qwen2ForCausalLM:
    """Three layers of width 192; large embeddings and small output projections help the onset."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    for name, p in model.named_parameters():
        if "embed" in name:
            torch.nn.init.normal_(p, std=0.12)
        elif p.dim() == 2:
            out = 0.3 / math.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            torch.nn.init.normal_(p, std=out / math.sqrt(p.shape[1]))
    return model.train()


@torch.no_grad()
def start_as_copier(model: Qwen2ForCausalLM) -> None:
    """Start two layers as an induction circuit, the known way in which attention copies.

    Heads 0 and 1 of layer 0 look one and two tokens back, through query and key biases that RoPE
    turns by as many positions. Heads 0 and 1 of layer 1 look for the current token among those
    noted as one back and write what stood behind it, through the tied embeddings; what stood two
    back is there for training to use. Training is free to undo all of it.
    """
    width, size = model.config.hidden_size, 64
    before, match = (model.model.layers[i].self_attn for i in (0, 1))
    pairs = 8  # the fast frequencies tell neighbours apart
    angle = 10000.0 ** (-torch.arange(0, size, 2)[:pairs] / size)
    sharp = math.sqrt(40.0)
    read = torch.linalg.qr(torch.randn(width, size))[0].T
    one, two = torch.linalg.qr(torch.randn(width, 2 * size))[0].split(size, dim=1)
    copy = torch.linalg.qr(torch.randn(width, width))[0]
    slow = torch.cat([torch.arange(12, 32), torch.arange(44, 64)])  # dimensions RoPE hardly turns
    for head, note in enumerate((one, two)):
        rows, turned = slice(head * size, (head + 1) * size), angle * (head + 1)
        for projection in (before.q_proj, before.k_proj, match.q_proj, match.k_proj):
            projection.weight[rows] *= 0.1
        before.k_proj.bias[rows][:pairs] = sharp
        before.q_proj.bias[rows][:pairs] = sharp * turned.cos()
        before.q_proj.bias[rows][size // 2 : size // 2 + pairs] = -sharp * turned.sin()
        before.v_proj.weight[rows] = read
        before.o_proj.weight[:, rows] = 0.3 * note
        match.q_proj.weight[head * size + slow] = 1.6 * read[: len(slow)]
        match.k_proj.weight[head * size + slow] = 1.6 * one.T[: len(slow)]
        match.v_proj.weight[rows] = copy[:, rows].T
        match.o_proj.weight[:, rows] = math.sqrt(2) * copy[:, rows]


class Muon(torch.optim.Optimizer):
    """Muon in float32: torch's own iterates in bfloat16, ten times slower on CPUs without it.

    Same rule otherwise: Nesterov momentum 0.95, five Newton-Schulz steps (Jordan et al., 2024), for
    all matrices of one shape at once.
    """

    def __init__(self, params: list, defaults: dict, pool: ThreadPoolExecutor) -> None:
        super().__init__(params, defaults)
        self.pool = pool

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix in place."""
        rate, shapes = self.param_groups[0]["lr"], defaultdict(list)
        for p in self.param_groups[0]["params"]:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.lerp_(p.grad, 0.05)
            shapes[p.shape].append((p, p.grad.lerp(buffer, 0.95)))
        stacks = [torch.stack([update for _, update in pairs]) for pairs in shapes.values()]
        made = self.pool.map(self.orthogonal, stacks)
        for (rows, columns), pairs, updates in zip(shapes, shapes.values(), made, strict=True):
            for (p, _), update in zip(pairs, updates, strict=True):
                p.mul_(1 - 0.01 * rate).sub_(update, alpha=rate * max(1.0, rows / columns) ** 0.5)

    @staticmethod
    @torch.no_grad()
    def orthogonal(g: torch.Tensor) -> torch.Tensor:
        """Bring the singular values of each matrix of ``g`` (n, rows, columns) near 1."""
        tall = g.shape[1] > g.shape[2]
        x = g.mT if tall else g
        x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        return x.mT if tall else x


class Trainer:
    """Muon for the matrices, AdamW for the rest; a loss over weighted targets.

    Each of two threads takes half of a batch: one operator on two cores is the slower way.
    """

    def __init__(self, model: Qwen2ForCausalLM, muon: float, adamw: float) -> None:
        self.model, self.steps, self.pool = model, 0, ThreadPoolExecutor(2)
        torch.set_num_threads(1)
        self.parameters = list(model.parameters())
        matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
        inside = {id(p) for p in matrices}
        others = [p for p in self.parameters if id(p) not in inside]
        self.optimizers = [
            Muon(matrices, {"lr": muon}, self.pool),
            torch.optim.AdamW(others, lr=adamw, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.rates = [muon, adamw]

    def step(
        self, ids: torch.Tensor, weights: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update once on ``ids`` and ``weights`` (B, T); return the targets' losses and weights."""
        # A random quarter of the context's tokens stands in for all: the head is not cheap.
        heard = (weights == 1) | (torch.rand(weights.shape) < 0.25)
        weights = torch.where(weights == 1, weights, 4 * weights) * heard
        share = weights / weights[:, 1:].sum()
        losses, *grads = zip(*self.pool.map(self.half, ids.chunk(2), share.chunk(2)), strict=True)
        for p, parts in zip(self.parameters, grads, strict=True):
            p.grad = sum(parts)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale * min(1.0, (self.steps + 1) / 60)
            optimizer.step()
        self.steps += 1
        return torch.cat(losses), weights[:, 1:][weights[:, 1:] > 0]

    def half(self, ids: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Losses of the targets that have a share, and the gradient of their weighted sum."""
        picked = share[:, 1:] > 0
        hidden = self.model.model(ids).last_hidden_state[:, :-1][picked]
        losses = F.cross_entropy(self.model.lm_head(hidden), ids[:, 1:][picked], reduction="none")
        loss = (losses * share[:, 1:][picked]).sum()
        return losses.detach(), *torch.autograd.grad(loss, self.parameters)


class Mean:
    """A running mean that forgets."""

    def __init__(self, keep: float = 0.95) -> None:
        self.keep, self.value = keep, None

    def add(self, x: float) -> float:
        """Take ``x`` in."""
        self.value = x if self.value is None else self.keep * self.value + (1 - self.keep) * x
        return self.value


def batches(examples: list[Example], rng: random.Random, longest: int) -> Iterator[tuple]:
    """Pad examples of like length together, about ``BATCH_TOKENS`` at a time, in random order."""
    rows = [e for e in examples if len(e[0]) <= longest]
    rows.sort(key=lambda e: len(e[0]) + rng.random() * 30)
    groups: list[list[Example]] = [[]]
    for row in rows:
        if (len(groups[-1]) + 1) * len(row[0]) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    for group in groups:
        width = max(len(i) for i, _ in group)
        yield (
            torch.tensor([i + [0] * (width - len(i)) for i, _ in group]),
            torch.tensor([w + [0.0] * (width - len(w)) for _, w in group]),
        )


def lessons_of_stage(lessons: Lessons, stage: int) -> list[Example]:
    """Stages 0 to 2 read ever more documents; stage 3 plays the protocol."""
    if stage < 3:
        reading = lessons.readings(350, stage + 1, (0.5, 0.3, 0.0)[stage])
        return [*reading, *lessons.episodes(30, (1, 1, 2, 3))]
    return [*lessons.readings(150, 5, 0.0), *lessons.episodes(200)]


def exam(engine: HFEngine, entities: list[Entity]) -> str:
    """Let the model answer 140 questions of a world it was never trained in."""
    with tempfile.TemporaryDirectory() as folder:
        world = deal(entities, random.Random("exam"))
        search = build_index(world.passages(), folder)
        asked = Lessons(world, search, engine, random.Random(0)).questions(140)
        runs = rollout(asked, engine, search, keep_all, Method(budget=4, form=FORM), Sampling(80))
    right = {many: [] for many in (False, True)}
    for t in runs:
        right[t.question.hops > 1].append(t.prediction == t.question.answers[0])
    single, multi = (sum(r) / len(r) for r in right.values())
    return f"exam: single-hop {single:.2f}, multi-hop {multi:.2f}"


def school(trainer: Trainer, engine: HFEngine, seed: int, tokens: int, log: callable) -> None:
    """Go through the stages within ``tokens`` tokens; a loss ends a stage, or its share does."""
    rng, entities = random.Random(seed), training_entities()
    stage, done, mean, since = 0, 0, Mean(0.98), 0
    for number in itertools.count():
        draw = random.Random(f"{seed}-{number}")
        world = deal(entities, draw, INVENTED[done > tokens * 2 / 3])
        with tempfile.TemporaryDirectory() as folder:
            search = build_index(world.passages(), folder)
            examples = lessons_of_stage(Lessons(world, search, engine, rng), stage)
        for ids, weights in batches(examples, rng, 320 if stage < 3 else 900):
            share = done / tokens
            scale = min(1.0, max(0.03, (1 - share) / 0.6))
            losses, w = trainer.step(ids, weights, scale)
            mean.add(losses[w == 1].mean().item())
            done, since = done + int((weights > 0).sum()), since + 1
            if trainer.steps % 100 == 0:
                log(f"stage {stage} step {trainer.steps} tokens {done:,} loss {mean.value:.3f}")
            if trainer.steps % 1000 == 0:
                log(exam(engine, entities))
            if stage < 3 and since >= 40 and (mean.value < ENOUGH[stage] or share > LATEST[stage]):
                stage, since = stage + 1, 0
                log(f"stage {stage} begins at {done:,} tokens")
                break
            if done >= tokens:
                log(exam(engine, entities))
                return


def main() -> None:
    """Train one seed and save it as a Hugging Face folder, weights in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=float, default=9e6, help="training tokens")
    parser.add_argument("--out", type=Path, default=HERE / "base")
    args = parser.parse_args()
    started = time.monotonic()
    log = lambda text: print(f"{time.monotonic() - started:6.0f} s  {text}", flush=True)  # noqa: E731
    torch.manual_seed(args.seed)
    entities = training_entities()
    worlds = [deal(entities, random.Random(f"{args.seed} tokens {i}")) for i in range(4)]
    tokenizer = make_tokenizer(worlds, args.seed)
    model = make_model()
    start_as_copier(model)
    log(f"{model.num_parameters() / 1e6:.2f}M weights, seed {args.seed}")
    trainer = Trainer(model, muon=0.02, adamw=2e-3)
    school(trainer, HFEngine(model, tokenizer), args.seed, int(args.tokens), log)
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "made.json").write_text(
        json.dumps({"seed": args.seed, "tokens": args.tokens}) + "\n"
    )
    log(f"saved {args.out}")


if __name__ == "__main__":
    main()
