"""Host eviction reaches everything that may go."""

from __future__ import annotations

import numpy as np

from hicache.radix import RadixKey, RadixTree, check_tree


def test_a_duplicate_above_a_sole_copy_goes_once_the_sole_copy_has_gone() -> None:
    tree = RadixTree(1)
    tree.insert(RadixKey([1, 2]), np.array([0, 1]))
    node = tree.insert(RadixKey([1, 2, 3, 4]), np.arange(4)).node
    ticket = tree.begin_write(node)
    assert ticket is not None
    tree.commit_write(ticket, np.arange(4), 4)
    assert len(tree.evict(1).freed) == 2

    assert sorted(tree.evict_host(4)) == [0, 1, 2, 3]
    assert check_tree(tree) == []
    assert tree.match(RadixKey([1, 2, 3, 4])).num_device_pages == 2
