"""`inferq plan`: what one worker will hold, and the values of the Helm chart that follow."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, Final

from inferq.cli import exit_codes
from inferq.cli.extras import load_extra
from inferq.cli.flags import Commands, add_command, add_json_flag
from inferq.protocol.errors import InvalidRequestError

_EXAMPLES: Final = """\
Examples:
  inferq plan --model ./Qwen3-8B --gpu h100
  inferq plan --model ./Llama-70B --gpu a100-80gb --tensor-parallel-size 4 --max-model-len 32768
  inferq plan --model ./only-config-json --weights-gib 15.3 --gpu 24 --tokens-per-job 1500
  inferq plan --model ./Qwen3-8B --gpu h100 --worker-tokens-per-second 2500

An estimate: how large a step gets is measured when a worker starts, whose log says the truth.
"""
_GIB: Final = 2**30
_TOKENS_PER_JOB: Final = 2048


def add_commands(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "plan", "say what a worker on a GPU will hold", _EXAMPLES)
    parser.add_argument(
        "--model", required=True, metavar="FOLDER", help="folder in Hugging Face form"
    )
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="a GPU's name, or its memory in GiB"
    )
    parser.add_argument(
        "--weights-gib",
        type=float,
        metavar="GIB",
        help="size of the weights, for a folder that has config.json only",
    )
    for flag, kind, default, text in (
        ("--tensor-parallel-size", int, 1, "GPUs among which the model is divided"),
        ("--gpu-memory-utilization", float, 0.9, "share of the memory that the worker may use"),
        ("--max-model-len", int, None, "longest prompt plus output, in tokens"),
        (
            "--tokens-per-job",
            int,
            None,
            f"typical prompt plus output, in tokens (default: {_TOKENS_PER_JOB}, or the longest)",
        ),
        ("--worker-tokens-per-second", float, None, "of one worker, to say how many a server has"),
    ):
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(
            flag, type=kind, default=default, metavar="VALUE", help=f"{text}{shown}"
        )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    planning = load_extra("inferq.worker.plan", extra="worker")
    _check(arguments)
    demand = planning.Demand(
        gpu_bytes=planning.memory_of(arguments.gpu),
        tensor_parallel_size=arguments.tensor_parallel_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_model_len=arguments.max_model_len,
    )
    weights = arguments.weights_gib
    plan = planning.make_plan(
        arguments.model, demand, None if weights is None else int(weights * _GIB)
    )
    tokens = _tokens_per_job(arguments.tokens_per_job, plan.max_model_len)
    jobs, full_jobs = (
        min(plan.jobs_of(length), demand.max_num_seqs) for length in (tokens, plan.max_model_len)
    )
    speed = arguments.worker_tokens_per_second
    workers = None if speed is None else int(planning.SERVER_TOKENS_PER_S // speed)
    if arguments.json:
        whole = dataclasses.asdict(plan)
        whole |= {"num_tokens": plan.num_tokens, "full_jobs": full_jobs}
        print(json.dumps({**whole, "jobs": jobs, "workers_per_server": workers}))
    else:
        _print(plan, full_jobs, jobs, workers, tokens)
    return exit_codes.OK


def _tokens_per_job(asked: int | None, longest: int) -> int:
    """Return the length of a typical job; raise `InvalidRequestError` where none is as long."""
    if asked is not None and asked > longest:
        raise InvalidRequestError(
            f"{asked} is more than the longest job has ({longest})",
            field="tokens_per_job",
            limit=longest,
        )
    return asked or min(_TOKENS_PER_JOB, longest)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse numbers that no estimate can be made of; the worker's settings are checked by it."""
    bounds: dict[str, tuple[float, float]] = {
        "tokens_per_job": (1, 2**31),
        "weights_gib": (1e-9, 2**20),
        "worker_tokens_per_second": (1e-3, 1e9),
    }
    for name, (least, most) in bounds.items():
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            raise InvalidRequestError(f"must be from {least:g} to {most:g}", field=name, limit=most)


def _print(plan: Any, full_jobs: int, jobs: int, workers: int | None, tokens_per_job: int) -> None:
    print(f"weights        {plan.weight_bytes / _GIB:.1f} GiB on each GPU")
    print(f"a step         {plan.step_bytes / _GIB:.1f} GiB, estimated")
    print(
        f"KV cache       {plan.cache_bytes / _GIB:.1f} GiB: {plan.num_blocks:,} blocks of "
        f"{plan.block_size} tokens ({plan.block_bytes / 2**20:.2f} MiB), {plan.num_tokens:,} tokens"
    )
    print(
        f"jobs at once   {full_jobs:,} of {plan.max_model_len:,} tokens; "
        f"{jobs:,} of {tokens_per_job:,}"
    )
    if workers is not None:
        print(f"one server     {workers:,} workers; beyond, a Redis Cluster with partitions")
    print(f"Helm values    worker.autoscaling.keda.jobsPerReplica: {max(1, jobs)}")
