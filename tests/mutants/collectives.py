"""What may go wrong in the functions of lessons.collectives."""

# Right sums, at the price of a root that sends to, or hears from, everybody.
STAR_DOWN = ("place, bit = place_in_tree(comm, root)",
             "if comm.rank == root:\n        for other in range(comm.size):\n"
             "            if other != root:\n                comm.send(x, other)\n    else:\n"
             "        comm.recv(x, source=root)\n    return\n    place = bit = 0")
STAR_UP = ("incoming = comm.scratch(x.size, x.dtype)",
           "incoming = comm.scratch(x.size, x.dtype)\n    if comm.rank == root:\n"
           "        for other in range(comm.size):\n            if other != root:\n"
           "                op(x, comm.recv(incoming, other), out=x)\n    else:\n"
           "        comm.send(x, root)\n    return")
CHAIN = ("place, bit = place_in_tree(comm, root)",
         "place = (comm.rank - root) % comm.size\n    if place:\n"
         "        comm.recv(x, (comm.rank - 1) % comm.size)\n    if place < comm.size - 1:\n"
         "        comm.send(x, (comm.rank + 1) % comm.size)\n    return\n    bit = 0")

MUTANTS = {
    "broadcast": [
        ("place + bit < comm.size", "place + 2 * bit < comm.size"),
        ("place_in_tree(comm, root)", "place_in_tree(comm, 0)"),      # the root is always 0
        ("source=(comm.rank - bit)", "source=(comm.rank - 1)"),
        ("comm.send(x, (comm.rank + bit) % comm.size)", "pass"),
        ("comm.recv(x, ", "comm.recv(x.copy(), "),                    # nobody keeps it
        ("comm.recv(x, ", "comm.recv(np.empty(x.size), "),
        ("while bit > 1", "while bit > 2"),
        ("if place + bit < comm.size", "if comm.rank + bit < comm.size"),
        ("comm.send(x, (comm.rank + bit)", "comm.send(x.astype(float), (comm.rank + bit)"),
        ("comm.send(x, (comm.rank + bit) % comm.size)",               # twice as many bytes
         "comm.send(np.concatenate([x, x])[:x.size], (comm.rank + bit) % comm.size)\n"
         "            comm.send(x, comm.rank)"),
        STAR_DOWN,
        CHAIN,
    ],
    "reduce": [
        ("op(x, ", "op(incoming, "),
        ("op(x, comm.recv(", "np.add(x, comm.recv("),                 # op ignored
        ("op=np.add", "op=np.maximum"),
        ("x.size, x.dtype", "x.size, np.float64"),                    # whatever the dtype
        ("out=x)", "out=x.copy())"),
        ("place_in_tree(comm, root)", "place_in_tree(comm, 0)"),
        ("while bit < top", "while 2 * bit < top"),
        ("place + bit < comm.size", "place + bit < comm.size - 1"),
        ("bit = 1\n", "bit = 2\n"),
        ("comm.send(x, (comm.rank - top)", "comm.send(x * 0, (comm.rank - top)"),
        ("comm.rank - top", "comm.rank - 1"),
        ("    if place:\n", "    if comm.rank != 0:\n"),
        STAR_UP,
    ],
    "pairwise": [
        ("received[comm.rank][...] = pieces[comm.rank]", "pass"),
        ("received[comm.rank][...] = pieces[comm.rank]", "received[comm.rank][...] = 0"),
        ("pieces[to], to", "pieces[comm.rank], to"),
        ("pieces[to], to", "pieces[source], to"),
        ("received[source], source", "received[to], source"),
        ("received[source], source", "received[source].copy(), source"),
        ("partners(comm.rank, comm.size)]", "partners(comm.rank, comm.size)[1:]]"),
        ("pieces[to], to, received[source], source)\n", "pieces[to].astype(float), to, "
         "received[source], source)\n"),
        ("comm.exchange(", "for x in received:\n        x[...] = 0\n    comm.exchange("),
        ("comm.exchange(", "comm.exchange([(pieces[comm.rank], comm.rank, "        # to oneself too
         "received[comm.rank], comm.rank)])\n    comm.exchange("),
        ("comm.exchange(", "pieces[comm.rank][...] = 0\n    comm.exchange("),
    ],
}
RIGHT = {
    "broadcast": [("comm.recv(x, ", "x[...] = comm.recv(np.empty_like(x), ")],
    "reduce": [("op(x, comm.recv(incoming, source=(comm.rank + bit) % comm.size), out=x)",
                "x[...] = op(comm.recv(np.empty_like(x), (comm.rank + bit) % comm.size), x)")],
    "pairwise": [("comm.exchange([(pieces[to], to, received[source], source)\n"
                  "                   for to, source in partners(comm.rank, comm.size)])",
                  "for k in range(1, comm.size):\n"
                  "        to, source = (comm.rank + k) % comm.size, (comm.rank - k) % comm.size\n"
                  "        comm.sendrecv(pieces[to], to, received[source], source)")],
}
