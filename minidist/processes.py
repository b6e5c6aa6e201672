"""Ranks as MPI processes: the one module that imports mpi4py.

Arrays go by the upper-case calls, as bytes; nothing is pickled. A receive takes any tag, because
the tag tells what the sender meant: the caller compares it and names both sides.
"""
import os

from mpi4py import MPI

from minidist import watch

SYNC = os.environ.get("MINIDIST_SYNC") == "1"


class Handle:
    """A started send or receive; keeps the array alive until it is waited for."""

    def __init__(self, request, array):
        self.request, self.array = request, array

    def wait(self):
        status = MPI.Status()
        self.request.Wait(status)
        self.array = None
        return status.Get_tag(), status.Get_count(MPI.BYTE)


class MPIWire:
    """One rank's end of an MPI communicator."""

    def __init__(self, mpi, status=None):
        self.mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        self.status = status or watch.Status()
        self.came = MPI.Status()

    def isend(self, x, to, tag):
        start = self.mpi.Issend if SYNC else self.mpi.Isend
        return Handle(start((x, x.nbytes, MPI.BYTE), to, tag), x)

    def irecv(self, into, source):
        return Handle(self.mpi.Irecv((into, into.nbytes, MPI.BYTE), source, MPI.ANY_TAG), into)

    def send(self, x, to, tag):
        send = self.mpi.Ssend if SYNC else self.mpi.Send
        send((x, x.nbytes, MPI.BYTE), to, tag)

    def recv(self, into, source):
        self.mpi.Recv((into, into.nbytes, MPI.BYTE), source, MPI.ANY_TAG, self.came)
        return self.came.Get_tag(), self.came.Get_count(MPI.BYTE)

    def sendrecv(self, x, to, tag, into, source):
        if SYNC:
            sent = self.isend(x, to, tag)
            came = self.recv(into, source)
            sent.wait()
            return came
        self.mpi.Sendrecv((x, x.nbytes, MPI.BYTE), to, tag,
                          (into, into.nbytes, MPI.BYTE), source, MPI.ANY_TAG, self.came)
        return self.came.Get_tag(), self.came.Get_count(MPI.BYTE)

    def split(self, color, key):
        """Form groups of equal color, ordered by (key, rank); None for color None."""
        mpi = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else MPIWire(mpi, self.status)

    def dup(self, status=None):
        return MPIWire(self.mpi.Dup(), status or self.status)

    def node(self):
        return MPIWire(self.mpi.Split_type(MPI.COMM_TYPE_SHARED), self.status)


def world():
    return MPIWire(MPI.COMM_WORLD.Dup())
