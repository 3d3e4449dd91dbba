"""The radix tree: pure decisions about which page is where; no torch, no threads, no I/O."""

from hicache.radix.eviction import EvictionPolicy, LearningPolicy, LruPolicy
from hicache.radix.invariants import check_tree
from hicache.radix.key import RadixKey
from hicache.radix.node import RadixNode
from hicache.radix.pinning_policy import PinningPolicy
from hicache.radix.policies import POLICY_NAMES, create_policy
from hicache.radix.records import (
    CopyKind,
    EvictResult,
    HeldPages,
    HostInsertResult,
    InsertResult,
    MatchResult,
    ResetResult,
    Ticket,
    WriteCommit,
)
from hicache.radix.tree import RadixTree
from hicache.radix.write_rule import Admission, Duplicates, WriteRule, write_rule_for

__all__ = [
    "POLICY_NAMES",
    "Admission",
    "CopyKind",
    "Duplicates",
    "EvictResult",
    "EvictionPolicy",
    "HeldPages",
    "HostInsertResult",
    "InsertResult",
    "LearningPolicy",
    "LruPolicy",
    "MatchResult",
    "PinningPolicy",
    "RadixKey",
    "RadixNode",
    "RadixTree",
    "ResetResult",
    "Ticket",
    "WriteCommit",
    "WriteRule",
    "check_tree",
    "create_policy",
    "write_rule_for",
]
