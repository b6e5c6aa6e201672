"""Comm over MPI and over threads: the same messages, checks and counts."""
import os
import sys
import threading
import weakref

import numpy as np
import pytest

import minidist
from minidist import collectives
from minidist.ranks import buffers, counting, environment, link
from minidist.ranks import comm as comms
from tests.mpi import mpi, on_ranks

SHAPES = [0, 1, 5, (2, 3), (0, 4), (), 200_000]
DTYPES = [t.name for t in buffers.DTYPES]


# -- messages -----------------------------------------------------------------------------------

def exchange(comm, shape, dtype="f8"):
    """Every kind of message once around the ring."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x, expected = np.full(shape, comm.rank + 1, dtype), np.full(shape, left + 1, dtype)

    def into():
        return np.zeros(shape, dtype)
    buffer = into()
    assert comm.shift(x, buffer) is buffer
    received = [buffer, comm.sendrecv(x, right, into(), left)]
    coming, going = comm.irecv(into(), left), comm.isend(x, right)
    received.append(coming.wait())
    if comm.rank % 2:                              # the two forms meet
        received.append(comm.sendrecv(x, right, into(), left))
    else:
        half = comm.irecv(into(), left), comm.isend(x, right)
        received.append(half[0].wait())
        half[1].wait()
    assert going.wait() is x and coming.wait() is received[2] and coming.ready()
    if comm.size > 1:
        if comm.rank % 2 == 0:
            comm.send(x, right)
        received.append(comm.recv(into(), left))
        if comm.rank % 2 == 1:
            comm.send(x, right)
    for y in received:
        np.testing.assert_array_equal(y, expected)
    several_at_once(comm, shape, dtype)
    comm.barrier()


def several_at_once(comm, shape, dtype="f8"):
    """With every other rank, and, of different sizes, twice with the same one."""
    others = [r for r in range(comm.size) if r != comm.rank]
    got = [np.zeros(shape, dtype) for _ in others]
    comm.exchange([(np.full(shape, comm.rank + 1, dtype), r, y, r) for r, y in zip(others, got)])
    for r, y in zip(others, got):
        np.testing.assert_array_equal(y, np.full(shape, r + 1, dtype))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size > 1:
        first, second = np.zeros(2, dtype), np.zeros(7, dtype)
        comm.exchange([(np.full(2, comm.rank + 1, dtype), right, first, left),
                       (np.full(7, comm.rank + 2, dtype), right, second, left)])
        assert (first == np.full(2, left + 1, dtype)).all()
        assert (second == np.full(7, left + 2, dtype)).all()
        moves = [(np.full(shape, comm.rank + k, dtype), right, np.zeros(shape, dtype), left)
                 for k in range(3)]
        if comm.rank % 2:                          # one by one meets all at once
            coming = [comm.irecv(into, source) for _, _, into, source in moves]
            for request in [comm.isend(x, to) for x, to, _, _ in moves] + coming:
                request.wait()
        else:
            comm.exchange(moves)
        for k, (_, _, into, _) in enumerate(moves):
            np.testing.assert_array_equal(into, np.full(shape, left + k, dtype))


def every_message(comm):
    for shape in SHAPES:
        exchange(comm, shape)
    for dtype in DTYPES:
        exchange(comm, 5, dtype)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("p", [1, 2, 4, 16])
def test_every_message_on_threads(p, sync):
    comms.run_threads(p, every_message, sync=sync)


@pytest.mark.parametrize("sync", ["0", "1"])
def test_every_message_on_mpi(sync):
    on_ranks(every_message_and_group, 4, env={"MINIDIST_SYNC": sync})


def every_message_and_group(comm):
    every_message(comm)
    exchange(comm.split(comm.rank % 2), 5, "f4")
    groups(comm)


def test_one_rank_alone():
    every_message(comms.solo())


def dropped(comm):
    """Nobody keeps the Request, and what is allocated next would lie where its array was."""
    n = 10_000
    if comm.rank == 0:
        comm.isend(np.arange(float(n)), 1)
        junk = [np.full(n, -1.0) for _ in range(10)]
        comm.barrier()
        del junk
    if comm.rank == 1:
        comm.barrier()
        np.testing.assert_array_equal(comm.recv(np.empty(n), 0), np.arange(float(n)))
        comm.isend(np.ones(1), 0)
    if comm.rank == 0:
        comm.recv(np.empty(1), 1)
        comm.isend(np.ones(1), 1)
        assert len(comm._sent) <= 2                # what has arrived is let go
    if comm.rank == 1:
        comm.recv(np.empty(1), 0)


def test_an_array_is_let_go_once_its_request_has_been_waited_for():
    def body(comm):
        x, peer = np.ones(5), 1 - comm.rank
        request, kept = comm.isend(x, peer), weakref.ref(x)
        comm.recv(np.empty(5), peer)
        request.wait()
        del x, request
        assert kept() is None
    comms.run_threads(2, body)
    comms.run_threads(2, body, sync=True)


def test_a_dropped_request_still_sends():
    comms.run_threads(2, dropped)
    comms.run_threads(2, dropped, sync=True)
    on_ranks(dropped, 2, env={"MINIDIST_SYNC": "1"})


# -- what is refused, before anything is sent ---------------------------------------------------

def grid(order="C"):
    return np.zeros((4, 6), order=order)


def read_only():
    x = np.zeros(6)
    x.flags.writeable = False
    return x


def unaligned():
    return np.zeros(49, "u1")[1:].view("f8")


REFUSED = {
    "not contiguous": (lambda: grid()[:, ::2], r"float64 \[4, 3\]\) is not contiguous; {remedy}"),
    "Fortran": (lambda: grid("F"), r"float64 \[4, 6\]\) is Fortran-ordered; {remedy}"),
    "byte order": (lambda: np.zeros(6, ">f8"), r"\(>f8 \[6\]\) has foreign byte order; use "),
    "type": (lambda: np.zeros(6, "U3"), r"\(<U3 \[6\]\) has a type that does not travel"),
    "object": (lambda: np.zeros(6, object), r"\(object \[6\]\) has a type that does not travel"),
    "a list": (lambda: [1.0, 2.0], "is a list, not a NumPy array"),
}
REFUSED_INTO = {
    "read-only": (read_only, r"into \(float64 \[6\]\) is read-only; receive into an array of yo"),
    "unaligned": (unaligned, r"into \(float64 \[6\]\) is not aligned"),
}


def refuse(bad, text, calls):
    """Both ranks try every call with a bad array; a good one must then be the first to arrive."""
    def body(comm):
        peer = 1 - comm.rank
        for call in calls:
            with pytest.raises((ValueError, TypeError), match=text):
                call(comm, bad(), peer)
        assert not any(count.messages for count in comm.counts.values())
        assert comm.sendrecv(np.ones(6), peer, np.zeros(6), peer)[0] == 1
    comms.run_threads(2, body)


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_cannot_be_sent_are_refused_by_name(name):
    bad, text = REFUSED[name]
    refuse(bad, "^x .*" + text.format(remedy=r"send np\.ascontiguousarray\(x\)"), [
        lambda comm, x, peer: comm.send(x, peer), lambda comm, x, peer: comm.isend(x, peer),
        lambda comm, x, peer: comm.sendrecv(x, peer, np.zeros(6), peer),
        lambda comm, x, peer: comm.exchange([(np.ones(6), peer, np.zeros(6), peer),
                                             (x, peer, np.zeros(6), peer)]),
        lambda comm, x, peer: comm.shift(x, np.zeros(6))])


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_INTO])
def test_arrays_that_cannot_be_received_into_are_refused_by_name(name):
    bad, text = {**REFUSED, **REFUSED_INTO}[name]
    refuse(bad, text.format(remedy="receive into a contiguous array, then copy"), [
        lambda comm, x, peer: comm.recv(x, peer), lambda comm, x, peer: comm.irecv(x, peer),
        lambda comm, x, peer: comm.sendrecv(np.zeros(6), peer, x, peer),
        lambda comm, x, peer: comm.exchange([(np.ones(6), peer, np.zeros(6), peer),
                                             (np.ones(6), peer, x, peer)]),
        lambda comm, x, peer: comm.shift(np.zeros(6), x)])


@pytest.mark.parametrize("peer", [-1, 2])
def test_a_peer_outside_the_group_is_refused(peer):
    told = f"rank {{}} cannot {{}} rank {peer}: group world has ranks 0 to 1"
    x = np.zeros(6)

    def body(comm):
        for call in (lambda: comm.send(x, peer), lambda: comm.sendrecv(x, peer, x.copy(), 0)):
            with pytest.raises(ValueError, match=told.format(comm.rank, "send to")):
                call()
        for call in (lambda: comm.recv(x, peer), lambda: comm.sendrecv(x, 0, x.copy(), peer)):
            with pytest.raises(ValueError, match=told.format(comm.rank, "receive from")):
                call()
    comms.run_threads(2, body)


# -- what arrives and does not fit --------------------------------------------------------------

def pairs_that_do_not_fit(comm):
    """Rank 0 sends, rank 1 expects something else: shorter, longer, of another type or size."""
    for sent, expected, told in [
            (np.ones(3), np.empty(5), "expected 5 float64 from rank 0, but got 3 float64$"),
            (np.ones(5), np.empty(3), "expected 3 float64 from rank 0, but got 5 float64$"),
            (np.ones(0), np.empty(3), "expected 3 float64 from rank 0, but got 0 float64$"),
            (np.ones(3, "f4"), np.empty(3), "expected 3 float64 .* got 3 float32$"),
            (np.ones(6, "f4"), np.empty(3), "expected 3 float64 .* got 6 float32$"),
            (np.ones(3, "i8"), np.empty(3), "expected 3 float64 .* got 3 int64$")]:
        for receive in (lambda into: comm.recv(into, 0), lambda into: comm.irecv(into, 0).wait(),
                        lambda into: comm.sendrecv(np.ones(1), 0, into, 0)):
            if comm.rank == 0:
                comm.send(sent, 1)
            if comm.rank == 1:
                with pytest.raises(ValueError, match="rank 1 of group world " + told):
                    receive(expected)
        if comm.rank == 0:
            comm.recv(np.empty(1), 1)


def one_of_several_does_not_fit(comm):
    """Rank 1 expects less of rank 2, then more of rank 0, than they send; others have no error."""
    for source, expected in (2, 3), (0, 9):
        others = [r for r in range(3) if r != comm.rank]
        into = [np.empty(expected if (comm.rank, r) == (1, source) else 5) for r in others]
        moves = [(np.ones(5), r, y, r) for r, y in zip(others, into)]
        if comm.rank != 1:
            comm.exchange(moves)
            continue
        with pytest.raises(ValueError, match=f"rank 1 of group world expected {expected} float64 "
                                             f"from rank {source}, but got 5 float64$"):
            comm.exchange(moves)


def calls_that_do_not_match(comm):
    """The ranks of a pair make different collective calls, which exchange messages all the same."""
    peer, x = comm.rank ^ 1, np.ones(4)
    with pytest.raises(ValueError) as caught:
        with comm.operation("broadcast" if comm.rank % 2 else "all_reduce"):
            comm.sendrecv(x, peer, np.empty(4), peer)
    mine, theirs = ("broadcast", "all_reduce")[::1 if comm.rank % 2 else -1]
    assert (f"in {mine} #1, but got 4 float64 in {theirs} #1: all ranks of a group must make the "
            "same calls in the same order") in str(caught.value)
    if comm.rank % 2:
        with comm.operation("all_gather"):
            pass
    with pytest.raises(ValueError, match="in barrier #[23], but got 0 uint8 in barrier #[23]"):
        comm.barrier()


@pytest.mark.parametrize("body", [pairs_that_do_not_fit, calls_that_do_not_match])
def test_what_does_not_fit_is_an_error_that_names_both(body):
    comms.run_threads(2, body)


def test_which_of_several_does_not_fit():
    comms.run_threads(3, one_of_several_does_not_fit)
    on_ranks(one_of_several_does_not_fit, 3)


@mpi(2)
def test_what_does_not_fit_on_mpi(comm):
    pairs_that_do_not_fit(comm)
    calls_that_do_not_match(comm)


def test_plain_messages_and_those_of_collectives_never_pair_up():
    def body(comm):
        early = comm.irecv(np.empty(1, "u1"), 1 - comm.rank)
        comm.barrier()                             # must not be caught by the receive above
        comm.send(np.ones(1, "u1"), 1 - comm.rank)
        assert early.wait()[0] == 1
    comms.run_threads(2, body)
    on_ranks(plain_and_collective, 2)


def plain_and_collective(comm):
    early = comm.irecv(np.empty(0, "u1"), 1 - comm.rank)
    comm.barrier()                                 # its messages are just like the one above
    comm.send(np.ones(0, "u1"), 1 - comm.rank)
    early.wait()


# -- large messages in pieces -------------------------------------------------------------------

@pytest.mark.parametrize("sync", ["0", "1"])
def test_messages_travel_in_pieces_below_the_limit(sync):
    on_ranks(in_pieces, 3, env={"MINIDIST_PIECE": "8000", "MINIDIST_SYNC": sync})


def in_pieces(comm):
    """1000 float64 to a piece: one piece, just one, one and a bit, three."""
    from minidist.ranks import processes
    cut = [len(processes.pieces(np.ones(n))) for n in (0, 999, 1000, 1001, 2500)]
    assert cut == [1, 1, 1, 2, 3]
    for n in (999, 1000, 1001, 2500):
        exchange(comm, n)
        x = np.arange(n * 3.0) + comm.rank
        total = np.arange(n * 3.0) * 3 + 3
        same = np.testing.assert_array_equal
        for algorithm in collectives.ALGORITHMS["all_reduce"]:
            same(collectives.all_reduce(x, comm, algorithm=algorithm), total)
        same(collectives.reduce_scatter(x, comm), total[n * comm.rank:n * (comm.rank + 1)])
        same(collectives.all_gather(x[:n], comm)[n:2 * n], np.arange(n) + 1)
        same(collectives.broadcast(x, comm, root=1), np.arange(n * 3.0) + 1)
        pieces = collectives.all_to_all([x[:n] + 10 * r for r in range(3)], comm)
        same(pieces[2], np.arange(n) + 2 + 10 * comm.rank)
    for sent, expected in [(2500, 2000), (2000, 2500), (1000, 2500), (999, 1001), (2500, 1000)]:
        if comm.rank == 0:
            comm.isend(np.ones(sent), 1)
        if comm.rank == 1:
            with pytest.raises(ValueError, match=f"expected {expected} float64 .* but got "):
                comm.recv(np.empty(expected), 0)
        comm = comm.split(0)                       # what is left of a longer one is never read


# -- collectives compared first -----------------------------------------------------------------

def different_calls(comm, check=True):
    comm.check = check
    with comm.operation("all_reduce", ("sum", 10)):
        pass
    with pytest.raises(ValueError) as caught:
        with comm.operation("all_reduce", ("sum", 12 if comm.rank == 1 else 10)):
            pass
    assert str(caught.value) == (
        "the ranks of group world do not make the same call: rank 0, 2: all_reduce #2 "
        "('sum', 10); rank 1: all_reduce #2 ('sum', 12)")
    comm.barrier()                                 # all are where they were, and may go on
    assert comm.current() == ("", 0, None)


def test_the_check_tells_all_ranks_who_differs():
    comms.run_threads(3, different_calls)
    comms.run_threads(3, different_calls, sync=True)
    on_ranks(different_calls, 3, env={"MINIDIST_CHECK": "1"})


# -- labels, counts, events ---------------------------------------------------------------------

def numbers(count):
    return count.calls, count.messages, count.bytes


def test_the_outermost_label_counts():
    def body(comm):
        x, into = np.ones(10), np.empty(10)
        with comm.counting() as total:
            comm.shift(x, into)
            with comm.label("outer"):
                comm.shift(x, into)
                with comm.operation("all_reduce"):
                    comm.shift(x, into)
                comm.shift(x, into)
            with comm.operation("all_reduce"):
                with comm.operation("reduce_scatter"), comm.label("inner"):
                    comm.shift(x, into)
                assert comm.current()[:2] == ("all_reduce", 2)
                comm.shift(x, into)
            assert comm.current()[:2] == ("", 0)
            comm.isend(x, 1 - comm.rank).wait()
            comm.recv(into, 1 - comm.rank)
            comm.exchange([(x, 1 - comm.rank, into + i, 1 - comm.rank) for i in range(3)])
        assert numbers(total) == (6, 10, 800)
        assert {k: numbers(c) for k, c in total.by_label.items()} == {
            "sendrecv": (1, 1, 80), "outer": (1, 3, 240), "all_reduce": (1, 2, 160),
            "isend": (1, 1, 80), "recv": (1, 0, 0), "exchange": (1, 3, 240)}
    comms.run_threads(2, body)


def test_counting_covers_groups_and_streams_made_from_the_group():
    def body(comm):
        tp = comm.split(0, name="tp")
        stream = tp.stream()
        with comm.counting() as total, tp.counting() as inner:
            comm.barrier()
            tp.shift(np.ones(3), np.empty(3))
            work = stream.submit(lambda x, comm: comm.shift(x, np.empty(5)), np.ones(5))
            work.wait()
        assert numbers(inner) == (2, 2, 64) and numbers(total) == (3, 3, 64)
        assert {k: numbers(c) for k, c in total.by_group.items()} == {
            "world": (1, 1, 0), "tp": (2, 2, 64)}
    comms.run_threads(2, body)


def test_recording_logs_both_ends_of_every_message():
    def body(comm):
        tp = comm.split(0, name="tp")
        with comm.recording() as events:
            with tp.operation("all_gather"):
                tp.sendrecv(np.ones(2), (comm.rank + 1) % 3, np.empty(2), (comm.rank - 1) % 3)
            coming = comm.irecv(np.empty(4), (comm.rank - 1) % 3)
            comm.send(np.ones(4), (comm.rank + 1) % 3)
            coming.wait()
            right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
            comm.exchange([(np.ones(1), right, np.empty(1), left),
                           (np.ones(5), left, np.empty(5), right)])
        comm.barrier()
        assert [(e.op, e.group, e.kind, e.peer, e.nbytes) for e in events] == [
            ("all_gather", "tp", "send", right, 16), ("all_gather", "tp", "recv", left, 16),
            ("send", "world", "send", right, 32), ("irecv", "world", "recv", left, 32),
            ("exchange", "world", "send", right, 8), ("exchange", "world", "recv", left, 8),
            ("exchange", "world", "send", left, 40), ("exchange", "world", "recv", right, 40)]
        assert all(e.rank == comm.rank and e.start <= e.end for e in events)
    comms.run_threads(3, body)


def test_collectives_have_codes_of_their_own_and_tags_fit_every_mpi():
    codes = [counting.code_of(name) for name in counting.COLLECTIVES]
    assert len(set(codes)) == len(codes) and all(1 <= c <= 31 for c in codes)
    assert 1 <= counting.code_of("any other") <= 31
    largest = (1 << 14) + max(buffers.CODES.values()) + (31 << 5) + 31
    assert largest < buffers.HEADER == 32767          # what MPI promises


# -- groups, scratch, streams, links ------------------------------------------------------------

def groups(comm):
    """Four ranks, split by color and key."""
    pair = comm.split(comm.rank // 2, key=-comm.rank, name="pair")
    assert (pair.size, pair.rank, pair.name) == (2, 1 - comm.rank % 2, "pair")
    assert list(pair.ranks) == [[1, 0], [3, 2]][comm.rank // 2]
    assert pair.shift(np.full(1, comm.rank), np.empty(1, int))[0] == comm.rank ^ 1
    none = comm.split(None if comm.rank == 0 else 1)
    assert none is None if comm.rank == 0 else (none.size, none.rank) == (3, comm.rank - 1)
    assert comm.node().size == 4


def test_groups_on_threads():
    comms.run_threads(4, groups)


def test_scratch_is_kept_and_grows():
    comm = comms.solo()
    a = comm.scratch(10, "f8")
    assert a.shape == (10,) and a.dtype == np.float64
    assert np.shares_memory(a, comm.scratch(10, "f8"))
    assert np.shares_memory(a, comm.scratch(4, "f4"))
    assert not np.shares_memory(a, comm.scratch(10, "f8", slot=1))
    assert comm.scratch(1000, "i8").size == 1000
    whole = comm.scratch(1000, "i8")
    for n in range(1000):                          # sizes that depend on data
        assert np.shares_memory(comm.scratch(n + 1, "i8"), whole)      # the buffer stays the same
        assert len(comm.scratch.views) <= 100


def in_order(comm):
    """What a stream was given runs in order; results and errors surface at wait()."""
    stream, done = comm.stream(), []

    def work(i, comm):
        done.append(i)
        return comm.shift(np.full(3, float(i)), np.empty(3))
    works = [stream.submit(work, i) for i in range(5)]
    comm.shift(np.ones(2), np.empty(2))            # meanwhile, on the communicator of this thread
    assert [w.wait()[0] for w in works] == [0, 1, 2, 3, 4] and done == [0, 1, 2, 3, 4]
    assert works[0].wait()[0] == 0

    def fail(comm):
        raise KeyError("boom")
    first, second = stream.submit(fail), stream.submit(work, 9)
    for failed in (second, first):                 # what comes after an error does not run
        with pytest.raises(KeyError, match="boom"):
            failed.wait()
    assert 9 not in done
    comm.barrier()


def test_a_stream_runs_in_order_on_threads():
    comms.run_threads(3, in_order)
    comms.run_threads(3, in_order, sync=True)


@mpi(3)
def test_a_stream_runs_in_order_on_mpi(comm):
    in_order(comm)


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_link_has_latency_and_two_ports(monkeypatch):
    monkeypatch.setattr(link, "time", Clock())
    one, other = link.Link(latency=1.0, bandwidth=10.0), link.Link(latency=1.0, bandwidth=10.0)
    assert one.depart(20) == (0.0, 2.0) and one.depart(20) == (2.0, 4.0)      # one after the other
    assert other.arrive(0.0, 20) == 3.0            # 0 + latency + 20 bytes
    assert other.arrive(0.0, 20) == 5.0            # from another sender: waits for the port
    assert other.arrive(10.0, 20) == 13.0


def over_a_link(comm):
    before = comm.split(0, name="made before")
    with comm.link(latency=1e-4, bandwidth=1e9):
        for group in (comm, before, comm.split(0, name="made inside")):
            exchange(group, 1000)
        assert before._link is comm._link is not None
    assert before._link is comm._link is None
    exchange(comm, 10)
    before.link(latency=1e-5)
    with comm.link(latency=1e-4):
        assert before._link.latency == 1e-5        # its own


def test_messages_cross_a_link():
    comms.run_threads(3, over_a_link)
    comms.run_threads(3, over_a_link, sync=True)
    on_ranks(over_a_link, 3)


def test_messages_take_their_time(monkeypatch):
    """1000 bytes at 1e4 bytes per second: the port is busy for 0.1 s; they arrive 0.5 s later."""
    slept = []
    monkeypatch.setattr(link, "time", Clock())
    monkeypatch.setattr(link, "sleep_until", slept.append)

    def body(comm):
        comm.link(latency=0.5, bandwidth=1e4)
        with comm.counting() as total:
            comm.shift(np.zeros(125), np.empty(125))
        assert numbers(total) == (1, 1, 1000)
    comms.run_threads(2, body)
    assert sorted(slept) == [0.1, 0.1, 0.6, 0.6]


@pytest.mark.parametrize("linked", [0, 1])
def test_a_link_on_one_side_only_is_told(linked):
    def body(comm):
        if comm.rank == linked:
            comm.link(latency=1e-4)
        with pytest.raises(ValueError, match="only one of the two has a software link"):
            comm.sendrecv(np.ones(1), 1 - comm.rank, np.empty(1), 1 - comm.rank)
    comms.run_threads(2, body)


# -- what is made is given back -----------------------------------------------------------------

def closes(comm):
    """A group, with all that was made from it, is closed once, by call or at the end of a block."""
    with comm.split(0, name="dp", axes=("dp",)) as group:
        inner, stream = group.split(comm.rank % 2, name="inner"), group.stream()
        wires = [wire for c in (group, inner, stream.comm) for wire in (c.plain, c.collective)]
        assert (group.axes, inner.axes, comm.axes) == (("dp",), (), ())
        assert stream.comm.axes == ("dp",)
        assert stream.submit(lambda comm: comm.shift(np.ones(3), np.empty(3))).wait()[0] == 1
        late = group.irecv(np.empty(2), (comm.rank - 1) % comm.size)
        group.isend(np.full(2, 1.0 * comm.rank), (comm.rank + 1) % comm.size)      # nobody keeps it
    assert group.closed and inner.closed and stream.closed and stream.comm.closed
    assert late.wait()[0] == (comm.rank - 1) % comm.size
    assert not any(getattr(wire, "mpi", None) for wire in wires)         # a null communicator
    group.close(), inner.close(), stream.close()
    x = np.ones(2)
    for call in (lambda: group.send(x, 0), lambda: group.shift(x, x.copy()),
                 lambda: group.exchange([(x, 0, x + 0, 0), (x, 0, x + 1, 0)]),
                 lambda: inner.isend(x, 0),
                 lambda: group.recv(x, 0), lambda: group.irecv(x, 0), lambda: group.split(0),
                 lambda: group.stream(), lambda: stream.comm.send(x, 0)):
        with pytest.raises(ValueError, match="^group (dp|inner) is closed: no message goes"):
            call()
    with pytest.raises(ValueError, match="the stream of group dp is closed"):
        stream.submit(print)
    assert not comm._children and comm._worker is None
    comm.barrier()


@pytest.mark.parametrize("sync", [False, True])
def test_what_is_closed_is_closed_once_with_all_that_was_made_from_it(sync):
    for p in 1, 2, 3:
        comms.run_threads(p, closes, sync=sync)


def test_closing_on_mpi():
    on_ranks(closes, 3)


def test_what_a_closed_group_sent_still_counts():
    def body(comm):
        group = comm.split(0, name="dp")
        group.barrier()
        with comm.counting() as total:
            with group:
                group.shift(np.ones(3), np.empty(3))
            with comm.split(0, name="dp") as other, other.split(0, name="tp") as inner:
                other.barrier()
                inner.shift(np.ones(5), np.empty(5))
        assert {k: numbers(c) for k, c in total.by_group.items()} == {
            "dp": (2, 2, 24), "tp": (1, 1, 40)}
    comms.run_threads(2, body)


def test_an_error_inside_the_block_comes_out_though_the_others_do_not_close():
    def body(comm):
        with comm.split(0):
            if comm.rank == 0:
                raise KeyError("boom")
            comm.recv(np.empty(1), 0)
    with pytest.raises(KeyError, match="boom"):
        comms.run_threads(3, body)


def test_closing_a_stream_raises_the_error_that_nobody_has_seen():
    def body(comm):
        seen, unseen = comm.stream(), comm.stream()

        def fail(comm):
            raise KeyError("boom")
        work = seen.submit(fail)
        unseen.submit(fail)
        with pytest.raises(KeyError, match="boom"):
            work.wait()
        seen.close()
        with pytest.raises(KeyError, match="boom"):
            unseen.close()
        assert seen.closed and unseen.closed and comm._worker is None
    comms.run_threads(2, body)


def test_all_streams_of_a_rank_share_a_thread_that_runs_in_order_of_submission():
    def body(comm):
        first, second, done = comm.stream(), comm.split(0).stream(), []

        def work(i, comm):
            comm.barrier()
            done.append((i, threading.get_ident()))
        for i in range(6):
            (second if i % 3 else first).submit(work, i)
        first.close()
        second.close()
        assert [i for i, _ in done] == list(range(6)) and len({t for _, t in done}) == 1
        third = comm.stream()                      # after the last is closed, a new thread
        assert third.submit(lambda comm: comm.rank).wait() == comm.rank
    comms.run_threads(3, body)


def made_and_given_back(comm, make, times):
    """Make and close something again and again: no thread, descriptor or mailbox stays."""
    def held():
        world = getattr(comm.plain.bare, "world", None)
        if world is None:
            return threading.active_count(), len(os.listdir("/proc/self/fd"))
        return {box[0] for box in [*world.letters, *world.posts]}, len(world.actors)
    make(comm)
    comm.barrier()
    before = held()
    for _ in range(times):
        make(comm)
    comm.barrier()
    assert held() == before
    assert not comm._children and len(comm._closed) < 10


def groups_and_streams(comm):
    """What a mesh makes of this world, and a stream in each group."""
    row = comm.split(comm.rank // 2, name="tp", axes=("tp",))
    column = comm.split(comm.rank % 2, name="dp", axes=("dp",))
    streams = row.stream(), column.stream(), comm.stream()
    work = streams[1].submit(lambda comm: comm.shift(np.ones(2), np.empty(2)))
    assert work.wait().sum() == 2
    streams[2].close()
    row.close(), column.close()


def test_in_a_loop_nothing_stays_on_threads():
    comms.run_threads(4, made_and_given_back, groups_and_streams, 30)


def test_in_a_loop_nothing_stays_on_mpi():
    """1100 groups of two communicators each, and MPICH has 2048 in all."""
    on_ranks(made_and_given_back, 4, kwargs={"make": groups_and_streams, "times": 220})


# -- where groups come from ---------------------------------------------------------------------

def test_without_mpi_a_lone_process_is_a_group_of_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "minidist.ranks.processes", None)  # import raises ImportError
    monkeypatch.delattr(minidist.ranks, "processes", raising=False)
    monkeypatch.setattr(environment, "launched", lambda: False)
    assert comms.join().size == 1
    monkeypatch.setattr(environment, "launched", lambda: True)
    with pytest.raises(comms.BadInput, match="has no mpi4py that works .*: pip install"):
        comms.join()
