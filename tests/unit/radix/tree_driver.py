"""Drives a tree with random operations and knows, from outside, what must come out."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from hicache.radix import CopyKind, RadixKey, RadixNode, RadixTree, Ticket, check_tree

Stamp = tuple[str | None, bytes]


class Pool:
    """Page ids of one tier with the stamp of what was last copied into each."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages))
        self.stamps: dict[int, Stamp] = {}

    def alloc(self, count: int) -> np.ndarray | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for page in taken:
            self.stamps.pop(page, None)
        return np.array(taken, dtype=np.int64)

    def give_back(self, pages: np.ndarray) -> None:
        assert not set(pages.tolist()) & set(self.free), "a page was freed twice"
        self.free += pages.tolist()


@dataclasses.dataclass
class Copy:
    ticket: Ticket
    target: np.ndarray
    stamps: list[Stamp]
    key: RadixKey | None = None


class TreeModel:
    """A tree and what an outside book-keeper knows of it: who owns which page, and its bytes."""

    page_size = 2

    def __init__(self, *, device_pages: int = 40, host_pages: int = 40) -> None:
        self.tree = RadixTree(self.page_size)
        self.device = Pool(device_pages)
        self.host = Pool(host_pages)
        self.locked: list[RadixNode] = []
        self.copies: list[Copy] = []
        self.zombies: dict[Ticket, Copy] = {}
        self.held: list[tuple[set[Ticket], np.ndarray, np.ndarray]] = []
        self.seen: set[str] = set()

    def verify(self) -> None:
        assert check_tree(self.tree) == []
        own_device = [page for n in self.tree.nodes() for page in _ids(n.device_pages)]
        own_host = [page for n in self.tree.nodes() for page in _ids(n.host_pages)]
        for copy in [*self.copies, *self.zombies.values()]:
            if copy.ticket.kind in (CopyKind.WRITE, CopyKind.PREFETCH):
                own_host += copy.target.tolist()
            elif copy.ticket.kind == CopyKind.LOAD:
                own_device += copy.target.tolist()
        for _, device_pages, host_pages in self.held:
            own_device += device_pages.tolist()
            own_host += host_pages.tolist()
        assert sorted(own_device + self.device.free) == list(range(self.device.num_pages))
        assert sorted(own_host + self.host.free) == list(range(self.host.num_pages))
        for node in self.tree.nodes():
            for pages, pool in ((node.device_pages, self.device), (node.host_pages, self.host)):
                expected = self.stamps_of(node)
                assert [pool.stamps[page] for page in _ids(pages)] in ([], expected)

    def stamps_of(self, node: RadixNode) -> list[Stamp]:
        whole = b"".join(member.key for member in self.tree.path(node))
        salt = None if not node.namespace else _SALT_OF[node.namespace]
        step = self.page_size * 4
        return [(salt, whole[: (page + 1) * step]) for page in range(node.start, node.end)]

    def insert(self, key: RadixKey, *, lock: bool) -> None:
        num_pages = len(key) // self.page_size
        pages = self.device.alloc(num_pages)
        if pages is None:
            return
        step = self.page_size * 4
        for index, page in enumerate(pages.tolist()):
            self.device.stamps[page] = (key.cache_salt, key.data[: (index + 1) * step])
        result = self.tree.insert(key, pages)
        assert result.already_present_pages <= result.end_page <= num_pages
        present = result.present_pages.tolist()
        assert len(present) == result.already_present_pages
        assert [self.device.stamps[p] for p in present] == [
            (key.cache_salt, key.data[: (i + 1) * step]) for i in range(len(present))
        ]
        self.device.give_back(pages[: result.already_present_pages])
        self.device.give_back(pages[result.end_page :])
        if lock:
            self.tree.lock(result.node)
            self.locked.append(result.node)
        self.seen.add("adopt" if result.node.host_pages is not None else "insert")

    def match(self, key: RadixKey, *, lock: bool) -> None:
        found = self.tree.split_at(self.tree.match(key))
        step = self.page_size * 4
        stamps = [self.device.stamps[page] for page in found.device_pages.tolist()]
        host = [
            self.host.stamps[page]
            for node in self.tree.path(found.last_host_node, found.num_device_pages)
            for page in _ids(node.host_pages)
        ]
        assert stamps + host == [
            (key.cache_salt, key.data[: (i + 1) * step]) for i in range(len(stamps + host))
        ]
        assert len(stamps) == found.num_device_pages
        assert len(host) == found.num_host_pages
        assert found.last_host_node.end == found.num_device_pages + found.num_host_pages
        if lock:
            self.tree.lock(found.last_device_node)
            self.locked.append(found.last_device_node)

    def unlock(self, choice: int) -> None:
        if self.locked:
            self.tree.unlock(self.locked.pop(choice % len(self.locked)))

    def node(self, choice: int) -> RadixNode:
        nodes = [self.tree.root, *self.tree.nodes()]
        return nodes[choice % len(nodes)]

    def write(self, node: RadixNode) -> None:
        ticket = self.tree.begin_write(node)
        if ticket is not None:
            self.carry_out_write(ticket)

    def carry_out_write(self, ticket: Ticket) -> None:
        target = self.host.alloc(ticket.num_pages)
        if target is None:
            commit = self.tree.commit_write(ticket, np.empty(0, dtype=np.int64), 0)
            assert not len(commit.untaken_host)
            self.device.give_back(commit.freed_device)
            self.seen.add("no host page")
            return
        source = self.tree.ticket_device_pages(ticket).tolist()
        self.copies.append(Copy(ticket, target, [self.device.stamps[page] for page in source]))

    def load(self, node: RadixNode) -> None:
        ticket = self.tree.begin_load(node)
        if ticket is None:
            return
        target = self.device.alloc(ticket.num_pages)
        if target is None:
            assert not len(self.tree.commit_load(ticket, np.empty(0, dtype=np.int64), 0))
            return
        source = self.tree.ticket_host_pages(ticket).tolist()
        self.copies.append(Copy(ticket, target, [self.host.stamps[page] for page in source]))

    def persist(self, node: RadixNode) -> None:
        ticket = self.tree.begin_persist(node)
        if ticket is not None:
            _, hashes = self.tree.ticket_hashes(ticket)
            assert len(hashes) == ticket.num_pages == len(self.tree.ticket_host_pages(ticket))
            self.copies.append(Copy(ticket, np.empty(0, dtype=np.int64), []))

    def prefetch(self, anchor: RadixNode, tokens: list[int], salt: str | None) -> None:
        """Prefetch whole pages of `tokens` below `anchor`; `salt` counts below the root only."""
        count = len(tokens) // self.page_size
        ticket = self.tree.begin_prefetch(anchor, count)
        if ticket is None:
            return
        target = self.host.alloc(count)
        if target is None:
            assert not len(
                self.tree.commit_prefetch(ticket, RadixKey([]), np.empty(0, np.int64), 0).untaken
            )
            return
        salt = _SALT_OF[anchor.namespace] if anchor.parent else salt
        path = b"".join(member.key for member in self.tree.path(anchor))
        key = RadixKey(np.frombuffer(path, dtype=np.int32), cache_salt=salt).extend(tokens)
        step = self.page_size * 4
        first = ticket.first_page + 1
        stamps = [(salt, key.data[: (first + i) * step]) for i in range(count)]
        self.copies.append(Copy(ticket, target, stamps, key))

    def finish(self, choice: int, num_good: int) -> None:
        """End one copy, of this generation or an older one, with `num_good` good pages."""
        everything = [*self.copies, *self.zombies.values()]
        if not everything:
            return
        copy = everything[choice % len(everything)]
        if copy in self.copies:
            self.copies.remove(copy)
        else:
            del self.zombies[copy.ticket]
        self._commit(copy, num_good)
        if copy not in self.copies:
            self._release_held(copy.ticket)

    def _commit(self, copy: Copy, num_good: int) -> None:
        kind, tree = copy.ticket.kind, self.tree
        pool = self.device if kind == CopyKind.LOAD else self.host
        for page, stamp in list(zip(copy.target.tolist(), copy.stamps, strict=True))[:num_good]:
            pool.stamps[page] = stamp
        num_good = min(num_good, copy.ticket.num_pages)
        self.seen.add(f"{kind.value} {'good' if num_good else 'failed'}")
        if kind == CopyKind.WRITE:
            commit = tree.commit_write(copy.ticket, copy.target, num_good)
            self.host.give_back(commit.untaken_host)
            self.device.give_back(commit.freed_device)
        elif kind == CopyKind.LOAD:
            self.device.give_back(tree.commit_load(copy.ticket, copy.target, num_good))
        elif kind == CopyKind.PERSIST:
            tree.commit_persist(copy.ticket, num_good)
        else:
            assert copy.key is not None
            if not tree.can_commit_prefetch(copy.ticket):
                self.copies.append(copy)
                return
            result = tree.commit_prefetch(copy.ticket, copy.key, copy.target, num_good)
            self.host.give_back(result.untaken)

    def _release_held(self, ended: Ticket) -> None:
        keep = []
        for tickets, device_pages, host_pages in self.held:
            tickets.discard(ended)
            if tickets:
                keep.append((tickets, device_pages, host_pages))
            else:
                self.device.give_back(device_pages)
                self.host.give_back(host_pages)
        self.held = keep

    def evict(self, num_pages: int) -> None:
        result = self.tree.evict(num_pages)
        assert not result.writes
        self.device.give_back(result.freed)
        self.seen.add("evict")

    def evict_back(self, num_pages: int) -> None:
        result = self.tree.evict(num_pages, write_back=True)
        self.device.give_back(result.freed)
        for ticket in result.writes:
            self.seen.add("write_back")
            self.carry_out_write(ticket)

    def write_ahead(self, num_pages: int) -> None:
        for ticket in self.tree.begin_writes_ahead(num_pages):
            self.seen.add("write ahead")
            self.carry_out_write(ticket)

    def evict_host(self, num_pages: int) -> None:
        self.host.give_back(self.tree.evict_host(num_pages))

    def reset(self) -> None:
        while self.locked:
            self.tree.unlock(self.locked.pop())
        result = self.tree.reset()
        self.device.give_back(result.device_pages)
        self.host.give_back(result.host_pages)
        self.held += [(set(h.tickets), h.device_pages, h.host_pages) for h in result.held]
        self.zombies.update({copy.ticket: copy for copy in self.copies})
        self.copies = []
        self.seen.add("reset with held pages" if result.held else "reset")

    def drain(self) -> None:
        """End everything; afterwards every page can be evicted."""
        while self.copies or self.zombies:
            self.finish(0, 99)  # a prefetch that has to wait for another copy goes to the end
        while self.locked:
            self.unlock(0)
        self.host.give_back(self.tree.evict_host(10**6))
        self.device.give_back(self.tree.evict(10**6).freed)
        self.host.give_back(self.tree.evict_host(10**6))
        self.verify()
        assert list(self.tree.nodes()) == []


class TreeDriver(TreeModel):
    """Random operations over a tiny key space, so that paths collide all the time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def step(self) -> None:
        """Do one random operation and verify."""
        rng = self.rng
        rng.choice(
            [lambda: self.insert(self._key(), lock=rng.random() < 0.3)] * 4
            + [lambda: self.match(self._key(), lock=rng.random() < 0.6)] * 3
            + [lambda: self.unlock(rng.randrange(99))] * 3
            + [lambda: self.finish(rng.randrange(99), rng.choice([0, 1, 2, 3, 99, 99, 99]))] * 4
            + [lambda: self.write(self._node())] * 3
            + [lambda: self.load(self._node())] * 3
            + [lambda: self.persist(self._node())] * 3
            + [lambda: self.prefetch(self._node(), self._tokens(2 * rng.randint(1, 3)), "a")] * 3
            + [lambda: self.evict(rng.randrange(1, 8))]
            + [lambda: self.evict_back(rng.randrange(1, 12))]
            + [lambda: self.write_ahead(rng.randrange(1, 12))]
            + [lambda: self.evict_host(rng.randrange(1, 8))]
            + [self.reset] * (rng.random() < 0.3)
        )()
        self.verify()

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(count)]

    def _key(self) -> RadixKey:
        salt = self.rng.choice([None, None, "a", "b"])
        return RadixKey(self._tokens(self.rng.randrange(1, 14)), cache_salt=salt)

    def _node(self) -> RadixNode:
        return self.node(self.rng.randrange(99))


def _ids(pages: np.ndarray | None) -> list[int]:
    return [] if pages is None else pages.tolist()


_SALT_OF = {RadixKey([], cache_salt=salt).namespace: salt for salt in (None, "a", "b")}
