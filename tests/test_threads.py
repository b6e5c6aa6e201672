"""Ranks as threads: results, errors, and deadlocks that are exact and at once."""
import threading
import time

import numpy as np
import pytest

from minidist.ranks import comm as comms


def ring_sum(comm, n):
    total = x = np.full(n, comm.rank + 1.0)
    for _ in range(comm.size - 1):
        x = comm.shift(x, np.empty(n))
        total = total + x
    return total[0]


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 16, 64])
def test_results_come_in_rank_order(p, sync):
    assert comms.run_threads(p, ring_sum, 5, sync=sync) == [p * (p + 1) / 2] * p
    assert comms.run_threads(p, lambda comm: comm.rank) == list(range(p))


def test_the_first_ranks_error_is_raised_and_the_others_stop():
    def body(comm):
        if comm.rank == 2:
            raise KeyError("boom")
        comm.recv(np.empty(3), 2)
    with pytest.raises(KeyError, match="boom"):
        comms.run_threads(4, body)


def deadlock(p, body, **options):
    with pytest.raises(comms.Deadlock) as caught:
        comms.run_threads(p, body, **options)
    return str(caught.value)


def test_a_receive_that_nobody_answers():
    def body(comm):
        if comm.rank == 0:
            comm.recv(np.empty(10), 3)
    text = deadlock(4, body)
    assert "rank 0 waits for a message from rank 3  recv, 80 bytes, group world" in text
    assert "tests/test_threads.py:" in text and "in body" in text
    assert all(f"rank {r} has finished" in text for r in (1, 2, 3))
    assert "cause: rank 0 waits for rank 3, which has finished" in text


def test_a_cycle_of_receives():
    text = deadlock(3, lambda comm: comm.recv(np.empty(1), (comm.rank + 1) % 3))
    assert "a cycle of receives (rank 0 -> rank 1 -> rank 2 -> rank 0)" in text


def test_all_send_first():
    def body(comm):
        comm.send(np.ones(4), 1 - comm.rank)
        comm.recv(np.empty(4), 1 - comm.rank)
    comms.run_threads(2, body)                     # sends are buffered, as MPI does for small ones
    text = deadlock(2, body, sync=True)
    assert "rank 0 waits for rank 1 to receive" in text
    assert "all send first" in text and "hangs only for large messages" in text


def test_different_collectives():
    def body(comm):
        with comm.operation("broadcast" if comm.rank == 1 else "all_reduce", "10 float64"):
            comm.recv(np.empty(10), (comm.rank + 1) % 3)
    text = deadlock(3, body)
    assert "rank 0 is in recv in all_reduce #1 10 float64" in text
    assert "rank 1 is in recv in broadcast #1 10 float64" in text
    assert "all ranks of a group must make the same calls in the same order" in text


def test_a_deadlock_in_a_group_names_ranks_of_the_world():
    def body(comm):
        half = comm.split(comm.rank // 2, name="half")
        if comm.rank == 3:
            half.recv(np.empty(1), 0)
    assert "rank 3 waits for a message from rank 2  recv, 8 bytes, group half" in deadlock(4, body)


def test_a_rank_that_forms_no_group():
    def body(comm):
        if comm.rank != 1:
            comm.split(0)
    text = deadlock(3, body)
    assert "rank 0 waits for every rank of its group  split" in text
    assert "rank 0 waits for rank 1, which has finished" in text


def test_a_rank_that_does_not_close_its_group():
    def body(comm):
        group = comm.split(0, name="dp")
        if comm.rank != 1:
            group.close()
    text = deadlock(3, body)
    assert "rank 0 waits for every rank of its group  close, group dp" in text
    assert "rank 0 waits for rank 1, which has finished" in text


def test_a_deadlock_while_a_stream_closes():
    def body(comm):
        with comm.stream() as stream:
            if comm.rank == 0:
                stream.submit(lambda comm: comm.recv(np.empty(1), 1))
    text = deadlock(2, body)
    assert "rank 0 waits for its background stream  work" in text
    assert "rank 0 (stream) waits for a message from rank 1" in text


def test_a_deadlock_is_found_after_a_stream_was_closed():
    def body(comm):
        comm.stream().close()
        comm.recv(np.empty(1), 1 - comm.rank)
    assert "a cycle of receives" in deadlock(2, body, timeout=60)


def test_a_stream_that_hangs_meets_the_timeout():
    stop = threading.Event()
    with pytest.raises(TimeoutError, match="ranks still run after 0.2 s"):
        comms.run_threads(2, lambda comm: comm.stream().submit(lambda comm: stop.wait()).wait(),
                          timeout=0.2)
    stop.set()


@pytest.mark.parametrize("n", [0, -1])
def test_a_world_without_ranks_is_refused(n):
    with pytest.raises(comms.BadInput, match=rf"run_threads\({n}, ...\) runs nothing: give 1 rank"):
        comms.run_threads(n, ring_sum)


def test_a_deadlock_on_a_stream():
    def body(comm):
        stream = comm.stream()
        if comm.rank == 0:
            stream.submit(lambda comm: comm.recv(np.empty(1), 1)).wait()
    text = deadlock(2, body)
    assert "rank 0 waits for its background stream" in text
    assert "rank 0 (stream) waits for a message from rank 1" in text and "in body" in text


def test_sixty_four_ranks_deadlock_as_fast():
    text = deadlock(64, lambda comm: comm.recv(np.empty(1), (comm.rank - 1) % 64))
    assert "rank 63 waits for a message from rank 62" in text


def test_a_rank_that_computes_for_ever_meets_the_timeout():
    stop = threading.Event()

    def body(comm):
        if comm.rank == 1:
            stop.wait()
        else:
            comm.recv(np.empty(1), 1)
    with pytest.raises(TimeoutError, match=r"rank 1 computes  at .*test_threads.py:\d+ in body"):
        comms.run_threads(2, body, timeout=0.2)
    stop.set()


def test_thread_ranks_inside_a_thread_rank():
    def body(comm):
        inner = comms.run_threads(3, ring_sum, 2)
        comm.barrier()
        return inner
    assert comms.run_threads(2, body) == [[6.0] * 3] * 2


def test_no_thread_is_left():
    def body(comm):
        stream = comm.stream()
        stream.submit(lambda comm: comm.barrier())
    before = threading.active_count()
    comms.run_threads(4, body)
    for _ in range(200):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_sent_array_may_be_overwritten_at_once():
    def body(comm):
        x = np.full(4, comm.rank + 1.0)
        comm.send(x, 1 - comm.rank)
        x[:] = -1
        return comm.recv(np.empty(4), 1 - comm.rank)[0]
    assert comms.run_threads(2, body) == [2.0, 1.0]
