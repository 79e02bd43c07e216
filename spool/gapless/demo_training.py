"""The demo's training: a small character model on the text of Python's own reference, on several ranks.

Real parts throughout: torch.distributed over gloo, gradients averaged over ranks, statistics recorded on every rank and
reduced by one export, metrics written by rank 0. Run by `gapless demo`; nothing else imports it.
"""

from __future__ import annotations

import argparse
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gapless
from gapless import stats_tracker

SEQUENCE = 64
BATCH = 16
HIDDEN = 96
EVAL_EVERY = 25


class CharacterModel(nn.Module):
    """Next-character logits, [batch, sequence, vocabulary], from characters, [batch, sequence] of int64."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, HIDDEN)
        self.recur = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        hidden, _ = self.recur(self.embed(characters))
        logits: Tensor = self.out(hidden)
        return logits


def reference_text() -> str:
    """The language reference that ships with Python, some hundred thousand characters of English."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str) -> tuple[Tensor, list[str]]:
    """The text as int64 character numbers, [length], and the vocabulary."""
    vocabulary = sorted(set(text))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    return torch.tensor([numbers[character] for character in text]), vocabulary


def batch_of(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows and the characters that follow them, both [BATCH, SEQUENCE]."""
    starts = torch.randint(len(data) - SEQUENCE - 1, (BATCH,), generator=generator).tolist()
    rows = torch.stack([data[start : start + SEQUENCE + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def record(logits: Tensor, targets: Tensor) -> Tensor:
    """Record what this batch shows on this rank; the mean loss to train on."""
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    stats_tracker.denominator(n_tokens=torch.ones_like(targets, dtype=torch.bool))
    stats_tracker.stat(
        denominator="n_tokens",
        loss=losses.detach(),
        accuracy=(logits.argmax(-1) == targets).float(),
        reduce_type=stats_tracker.ReduceType.AVG,
    )
    return losses.mean()


def train(args: argparse.Namespace) -> None:
    """Train; every rank records, every rank joins the export, rank 0 logs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data, vocabulary = encode(reference_text())
    held_out = len(data) // 20
    model = CharacterModel(len(vocabulary))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(args.rank)
    config = {"lr": 3e-3, "hidden": HIDDEN, "batch": BATCH * args.world_size, "vocabulary": len(vocabulary)}
    with gapless.init("demo", "character-gru", dir=args.dir, config=config) as run:
        for step in range(args.steps):
            metrics = train_step(model, optimizer, data[held_out:], generator, step, args)
            if step % EVAL_EVERY == 0 or step == args.steps - 1:
                metrics.update(evaluate(model, data[:held_out], generator))
            shown = {key: value for key, value in metrics.items() if not key.endswith("__count")}
            run.log(shown, step=step)
            if args.rank == 0 and step % 50 == 0:
                print(f"step {step:4d}  loss {metrics['train/loss']:.3f}", flush=True)  # noqa: T201 - it is a demo


def train_step(
    model: CharacterModel,
    optimizer: torch.optim.Optimizer,
    data: Tensor,
    generator: torch.Generator,
    step: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """One step on one batch a rank; the metrics over all ranks."""
    inputs, targets = batch_of(data, generator)
    with stats_tracker.record_timing("step"), stats_tracker.scope("train"):
        loss = record(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        flat /= args.world_size
        at = 0
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()
        optimizer.step()
        stats_tracker.scalar(grad_norm=float(flat.norm()), lr=3e-3 * min(1.0, (step + 1) / 20))
    return stats_tracker.export(reduce_group=dist.group.WORLD)


@torch.no_grad()
def evaluate(model: CharacterModel, data: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """Metrics on held-out text, over all ranks."""
    with stats_tracker.scope("eval"):
        inputs, targets = batch_of(data, generator)
        record(model(inputs), targets)
    metrics = stats_tracker.export(reduce_group=dist.group.WORLD)
    metrics["eval/perplexity"] = math.exp(metrics["eval/loss"])
    return metrics


def main() -> None:
    """Parse, join the group, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
