"""The options of `hicache replay`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.radix.policies import POLICY_NAMES
from hicache.replay.time_model import LoadRule
from hicache.replay.trace import TraceFormat
from hicache.types import PrefetchPolicy, StorageAdmission, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReplayArguments", "add_replay"]

_GIGA: Final = 1e9

_DESCRIPTION: Final = """\
Replay a trace of requests through the real radix tree and its eviction policies, and say how much
of the prompts it would have had to compute.

TRACE is a file of JSON lines, plain, .xz or .gz, or a tar archive of recorded sessions:
  Mooncake  timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens)
  log       tokens (list of ids) or prompt (text); if known timestamp (s) and output_tokens
  sessions  agentic/*.json in a .tar.xz, ids per 64 tokens, merged by time

A request hits the leading blocks that are cached when it comes; then all of its blocks are put in,
then the tier is brought to its size. The tree is driven with one symbol per block and a page size
of 1. Options that may be given again are combined, all with all, in one pass over the trace."""

_EPILOG: Final = """\
examples:
  hicache replay trace.jsonl.xz
      the hit ratio of LRU over sizes from 1 % to all of the distinct blocks
  hicache replay trace.jsonl --policy lru --policy slru --policy belady --capacity-blocks 5859
      policies side by side; belady knows the future: no policy can do better
  hicache replay trace.jsonl --capacity-blocks 3000 --host-blocks 12000 --storage-blocks inf \\
      --write-policy write_through --write-policy write_back --plot tiers.svg
      three tiers, two write policies, with a picture
  hicache replay trace.jsonl --capacity-blocks 3000 --advise --engine-price 4 --memory-price 0.01
      how much L2 and L3 pays at 4 per engine hour and 0.01 per GiB of memory and hour

Exit status: 0 done, 2 an option or the trace cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayArguments:
    """What the command line asks for; sizes in blocks, None for no bound.

    Attributes:
        trace: the file.
        format: None recognises it.
        block_tokens: None takes what is usual for the format.
        tokenizer: for the prompts of a log; None takes words for tokens.
        limit: requests to replay; None for all.
        policies, device_blocks, host_blocks, storage_blocks, write_policies: combined with each
            other; no `device_blocks` stands for shares of the distinct blocks, no `policies` for
            LRU, and for all of them in advice.
        storage_admission, prefetch_policy, load: of all.
        insert_output: whether answers are put in.
        prefill_tokens_per_second, kv_bytes_per_token, link_bytes_per_second,
            storage_bytes_per_second, storage_latency_seconds, attention_per_ki_token, speed: see
            `TimeModel`.
        advise: say what is worth having.
        engine_price, memory_price, storage_price: per engine and hour, and per GiB and hour; None
            when not known.
        json_path, plot_path: where results go besides.
    """

    trace: Path
    format: TraceFormat | None = None
    block_tokens: int | None = None
    tokenizer: Path | None = None
    limit: int | None = None
    policies: tuple[str, ...] = ()
    device_blocks: tuple[int | None, ...] = ()
    host_blocks: tuple[int | None, ...] = (0,)
    storage_blocks: tuple[int | None, ...] = (0,)
    write_policies: tuple[WritePolicy, ...] = (WritePolicy.WRITE_THROUGH,)
    storage_admission: StorageAdmission = StorageAdmission.ALL
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    load: LoadRule = LoadRule.AUTO
    insert_output: bool = False
    prefill_tokens_per_second: float = 20_000.0
    kv_bytes_per_token: int = 131_072
    link_bytes_per_second: float = 50 * _GIGA
    storage_bytes_per_second: float = 5 * _GIGA
    storage_latency_seconds: float = 0.0
    attention_per_ki_token: float = 0.0
    speed: float = 1.0
    advise: bool = False
    engine_price: float | None = None
    memory_price: float | None = None
    storage_price: float | None = None
    json_path: Path | None = None
    plot_path: Path | None = None


def add_replay(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    *,
    run: Callable[[ReplayArguments], int],
) -> None:
    """Add the command to a parser; `run` carries it out and returns the exit status."""
    parser = commands.add_parser(
        "replay",
        help="replay a request trace through sizes, policies and tiers; advise on sizes",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = ReplayArguments(trace=Path())
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the file, see above")
    _add_reading(parser)
    _add_caches(parser)
    _add_times(parser, defaults)
    _add_advice(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them: .svg, .png or .pdf (needs matplotlib)"
    )
    parser.set_defaults(run=lambda parsed: run(_chosen(parsed)))


def _add_reading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the trace")
    group.add_argument(
        "--format",
        choices=[member.value for member in TraceFormat],
        help="of TRACE (default: by its name and first line)",
    )
    group.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens in a block (default: 512; logs: 64)"
    )
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a tokenizer.json for the prompts of a log (default: a word is a token)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="replay only the first N requests")


def _add_caches(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the caches", "Sizes are in blocks, or inf.")
    group.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help=(
            f"order of eviction: {', '.join(POLICY_NAMES)}, module.path:ClassName of your own, or "
            "belady for the bound that knows the future (default: lru; all with --advise); may be "
            "given again"
        ),
    )
    group.add_argument(
        "--capacity-blocks",
        action="append",
        type=_size,
        metavar="N",
        help="of L1 (default: shares of the distinct blocks of the trace); may be given again",
    )
    for tier, name in (("L2", "host"), ("L3", "storage")):
        group.add_argument(
            f"--{name}-blocks",
            action="append",
            type=_size,
            metavar="N",
            help=f"of {tier} (default: 0, none); may be given again",
        )
    group.add_argument(
        "--write-policy",
        action="append",
        choices=[member.value for member in WritePolicy],
        help="when L1 is written to L2 (default: write_through); may be given again",
    )
    group.add_argument(
        "--storage-admission",
        choices=[member.value for member in StorageAdmission],
        default=StorageAdmission.ALL.value,
        help="what L3 takes: all that L2 gets, or what may well be used again (default: all)",
    )
    group.add_argument(
        "--prefetch-policy",
        choices=[member.value for member in PrefetchPolicy],
        default=PrefetchPolicy.WAIT_COMPLETE.value,
        help="how long a request waits for L3 (default: %(default)s)",
    )
    group.add_argument(
        "--load",
        choices=[member.value for member in LoadRule],
        default=LoadRule.AUTO.value,
        help=(
            "what becomes of hits in L2 and L3: loaded as far as that is faster than computing, "
            "always, or computed; times depend on it, hits do not (default: %(default)s)"
        ),
    )
    group.add_argument(
        "--insert-output",
        action="store_true",
        help=(
            "put answers in too. Where the trace has no ids of them they are taken from the next "
            "turn, and otherwise only take room"
        ),
    )


def _add_times(parser: argparse.ArgumentParser, defaults: ReplayArguments) -> None:
    group = parser.add_argument_group(
        "times",
        "One engine takes prompts one after another as they arrive; the time to first token is\n"
        "the wait, and then computing or loading, whichever is longer.",
    )
    group.add_argument(
        "--prefill-tokens-per-second",
        type=float,
        default=defaults.prefill_tokens_per_second,
        metavar="N",
        help="how fast the engine computes prompts (default: %(default)g)",
    )
    group.add_argument(
        "--kv-bytes-per-token",
        type=int,
        default=defaults.kv_bytes_per_token,
        metavar="N",
        help="of KV in all layers (default: %(default)s, Llama-3 8B in 16 bits)",
    )
    for name, value, text in (
        ("link", defaults.link_bytes_per_second, "from L2 to L1"),
        ("storage", defaults.storage_bytes_per_second, "from L3 to L2"),
    ):
        group.add_argument(
            f"--{name}-gb-per-second",
            type=float,
            default=value / _GIGA,
            metavar="GB",
            help=f"{text} (default: %(default)g)",
        )
    group.add_argument(
        "--storage-latency-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="of a read from L3, whatever its size (default: %(default)g)",
    )
    group.add_argument(
        "--attention-per-ki-token",
        type=float,
        default=0.0,
        metavar="F",
        help=(
            "a token takes this part of its time longer for each 1024 tokens before it "
            "(default: %(default)g)"
        ),
    )
    group.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="F",
        help="requests arrive F times as fast; 0.25 is the share of one of four engines",
    )


def _add_advice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "advice",
        "With --advise the command looks for the L2, L3 and policies that are worth having for an\n"
        "L1 of --capacity-blocks, no larger than --host-blocks and --storage-blocks. With prices\n"
        "it takes what saves most money; without, the smallest size that saves 95 % of the engine\n"
        "time that any could save.",
    )
    group.add_argument("--advise", action="store_true", help="say what is worth having, and why")
    for name, text in (
        ("engine", "an hour of the engine"),
        ("memory", "a GiB of L2 for an hour"),
        ("storage", "a GiB of L3 for an hour"),
    ):
        group.add_argument(f"--{name}-price", type=float, metavar="X", help=f"of {text}")


def _size(text: str) -> int | None:
    if text == "inf":
        return None
    value = int(text)
    if value < 0:
        raise ValueError
    return value


_size.__name__ = "size (a number of blocks, or inf)"


def _chosen(parsed: argparse.Namespace) -> ReplayArguments:
    defaults = ReplayArguments(trace=parsed.trace)
    return ReplayArguments(
        trace=parsed.trace,
        format=None if parsed.format is None else TraceFormat(parsed.format),
        block_tokens=parsed.block_tokens,
        tokenizer=parsed.tokenizer,
        limit=parsed.limit,
        policies=tuple(parsed.policy or ()),
        device_blocks=tuple(parsed.capacity_blocks or ()),
        host_blocks=tuple(parsed.host_blocks or defaults.host_blocks),
        storage_blocks=tuple(parsed.storage_blocks or defaults.storage_blocks),
        write_policies=tuple(map(WritePolicy, parsed.write_policy or defaults.write_policies)),
        storage_admission=StorageAdmission(parsed.storage_admission),
        prefetch_policy=PrefetchPolicy(parsed.prefetch_policy),
        load=LoadRule(parsed.load),
        insert_output=parsed.insert_output,
        prefill_tokens_per_second=parsed.prefill_tokens_per_second,
        kv_bytes_per_token=parsed.kv_bytes_per_token,
        link_bytes_per_second=parsed.link_gb_per_second * _GIGA,
        storage_bytes_per_second=parsed.storage_gb_per_second * _GIGA,
        storage_latency_seconds=parsed.storage_latency_ms / 1000,
        attention_per_ki_token=parsed.attention_per_ki_token,
        speed=parsed.speed,
        advise=parsed.advise,
        engine_price=parsed.engine_price,
        memory_price=parsed.memory_price,
        storage_price=parsed.storage_price,
        json_path=parsed.json,
        plot_path=parsed.plot,
    )
