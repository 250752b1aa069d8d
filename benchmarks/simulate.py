"""What it costs to simulate a large world: seconds, CPU seconds of this process and of those of
the ranks, and memory of this one.

    python benchmarks/simulate.py gpt                 # the GPT of examples/ on 64 to 32,768 ranks
    python benchmarks/simulate.py llama               # Llama 3 405B on 4,096 ranks
    python benchmarks/simulate.py plan                # strategies for a Llama of 7 B on 64 ranks

Models of Hugging Face are made of their configuration on the meta device; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import disttensor as dt
from disttensor.simulate import devices, plan_strategy, simulate
from disttensor.simulate.run import simulate_program
from disttensor.simulate.run_rank import of_script

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
WORLDS = 64, 512, 4096, 32768
MICRO_BATCHES = 16

# The Llama 3 Herd of Models, 2024, table 3; Llama 2, 2023.
SHAPES: dict[str, dict[str, Any]] = {
    "405B": {
        "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
        "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "7B": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
LAYERS = ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]


def llama(shape: str, sequences: int, context: int) -> Callable[[dt.Strategy], Callable[[], None]]:
    """``build_with`` of a step on ``sequences`` of ``context`` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils  # only we need it

    # It reads positions for whether sequences are packed, and without data makes a mask, as if they
    # were. They are not: real ranks have an attention that is causal, and no mask.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    config = LlamaConfig(**SHAPES[shape], use_cache=False)

    def build_with(strategy: dt.Strategy) -> Callable[[], None]:
        stages = strategy.visits()
        with torch.device("meta"):
            model: Any = LlamaForCausalLM(config)
        # the table of the rotary embedding is no parameter: it is made where it is needed
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        plan = dt.plans.megatron(model, "tp", stages[0])
        strategy.apply(model, plan=plan, layers=LAYERS, init=zeros)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(sequences, context, dtype=torch.long)

        def loss_of(rows: torch.Tensor) -> torch.Tensor:
            first = dt.shard_tensor(rows, stages[0], strategy.batch())
            last = dt.shard_tensor(rows, stages[-1], strategy.batch())
            with strategy.autocast():
                logits = model(input_ids=first).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), last.flatten())
            return loss / strategy.accumulate_steps

        def step() -> None:
            parts = tokens.chunk(strategy.accumulate_steps)
            dt.pipeline.run(loss_of, parts, strategy.schedule, stages=stages)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build_with


def zeros(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def gpt(world: int) -> dt.simulate.Report:  # type: ignore[name-defined]
    """16 stages where there are so many ranks; the others are replicas."""
    pp = min(16, world // 32)
    shards = world // pp // 8
    options = f"--pp {pp} --tp 8 --sharding 4 --layers 32 --accumulate 16 --batch {16 * shards}"
    options += " --width 256 --heads 8 --context 256"
    return simulate_program(of_script(str(SCRIPT), options.split()), world)


def llama_405b() -> Any:
    strategy = dt.Strategy(pp=16, sharding=32, tp=8, zero_stage=2, amp="bf16",
                           accumulate_steps=MICRO_BATCHES)  # fmt: skip
    build_with = llama("405B", 32 * MICRO_BATCHES, 8192)
    return simulate(lambda: build_with(strategy), 4096)


def llama_7b() -> Any:
    build_with = llama("7B", 64, 4096)
    return plan_strategy(build_with, 64, device=devices.H100)


def user_seconds() -> float:
    """Returns the user CPU time of this process and of its ended children."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(resource.getrusage(one).ru_utime for one in whose)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["gpt", "llama", "plan"])
    parser.add_argument("--world", type=int)
    args = parser.parse_args()
    if args.what == "gpt" and args.world is None:
        for world in WORLDS:  # each in a process of its own
            subprocess.run([sys.executable, __file__, "gpt", "--world", str(world)], check=True)
        return
    wall, cpu = time.perf_counter(), user_seconds()
    made = {"gpt": lambda: gpt(args.world), "llama": llama_405b, "plan": llama_7b}[args.what]()
    wall, cpu = time.perf_counter() - wall, user_seconds() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(made if args.what == "plan" else str(made).partition("\n\nmemory of")[0])
    print(f"{wall:.1f} s, {cpu:.1f} s of user CPU, {peak:,.0f} MB")


if __name__ == "__main__":
    main()
