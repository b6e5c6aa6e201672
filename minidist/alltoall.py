"""All-to-all: rank r's piece for rank s becomes rank s's piece from rank r (a transpose over ranks).

    rank 0   A0 A1 A2 A3            A0 B0 C0 D0
    rank 1   B0 B1 B2 B3     ->     A1 B1 C1 D1
    rank 2   C0 C1 C2 C3            A2 B2 C2 D2
    rank 3   D0 D1 D2 D3            A3 B3 C3 D3

    pairwise   p-1 messages, every piece goes straight to its owner: (p-1)/p of what a rank holds
    bruck      ceil(log2 p) messages, pieces hop: for tiny pieces, about (log2 p)/2 of what a rank holds

Lesson: mpirun -n 4 python -m lessons.collectives
Paper:  Bruck et al. 1997, "Efficient algorithms for all-to-all communications ..."
"""


def partners(rank, size):
    """Yield (to, source) of each exchange: mutual pairs when p is a power of two, else a ring of strides."""
    for step in range(1, size):
        if size & (size - 1) == 0:
            yield rank ^ step, rank ^ step
        else:
            yield (rank + step) % size, (rank - step) % size


def pairwise(pieces, received, comm):
    """Send pieces[s] to rank s and fill received[s] from it.  p arrays each, sizes may differ

    Collective: every rank calls.  received[s] must have the size that rank s sends."""
    received[comm.rank][...] = pieces[comm.rank]
    for to, source in partners(comm.rank, comm.size):
        comm.sendrecv(pieces[to], to, into=received[source], source=source)
