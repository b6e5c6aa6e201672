"""A background stream: messages under way on a second thread while this one computes.

    compute  |-- backward of layer 3 --|-- layer 2 --|-- layer 1 --|  wait  |
    stream                             |=== all_reduce 3 ===|= all_reduce 2 =|

Each stream has a communicator of its own; all streams of a rank share one thread, the Worker. What
is submitted runs strictly in order, to whichever stream, so every rank's streams make the same
calls in the same order, as a CUDA stream does for NCCL. MPI moves large messages only inside its
calls: a thread that sits in the call is what makes the overlap real (NumPy's matrix products
release the interpreter).
"""
import contextvars
import sys
import threading

from minidist.ranks import report
from minidist.ranks.threads import Stopped
from minidist.ranks.wire import Closing


class Worker:
    """The thread of one rank that runs what its streams are given, until the last stream closes."""

    def __init__(self, wire):
        self.wire = wire.thread("stream", self.end)
        self.status, self.queue, self.streams = self.wire.status, self.wire.queue(), 0
        self.status.idle = True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def end(self):
        """Finish what was submitted, and end the thread."""
        self.queue.put(None)
        self.thread.join()

    def _run(self):
        self.status.thread_id = threading.get_ident()
        try:
            while (work := self.queue.get()) is not None:
                self.status.idle, self.status.origin = False, work.origin
                work.run()
                self.status.idle, self.status.origin = True, ""
        except Stopped:
            pass                                   # the thread world has ended, this thread too
        self.wire.leave()


class Stream(Closing):
    """Runs functions in order on the Worker.  comm: the communicator they are given

    With `with`, it is closed at the end of the block.
    """

    def __init__(self, comm, caller, root):
        self.comm, self.caller, self.root = comm, caller, root
        self.worker, self.error, self.told, self.closed = root._worker, None, False, False
        self.worker.streams += 1
        comm._stream = self

    def submit(self, fn, *args):
        """Run fn(*args, comm=stream.comm) after everything submitted before -> Work"""
        if self.closed:
            raise ValueError(f"the stream of group {self.comm.name} is closed: it runs no more")
        work = Work(self, fn, args)
        self.worker.queue.put(work)
        return work

    def close(self):
        """Finish what was submitted and give the communicator back.  Collective

        Raises the error of a submitted function that no Work.wait has raised.
        """
        if self.closed:
            return
        free = Work(self, lambda comm: comm.close(), (), last=True)
        self.closed = True
        self.worker.queue.put(free)
        free.wait()
        self.worker.streams -= 1
        if not self.worker.streams:
            self.worker.end()
            self.root._worker = None
        if self.error is not None and not self.told:
            raise self.error


class Work:
    """Something submitted to a Stream.  After an error the stream runs only its own end: `last`"""

    def __init__(self, stream, fn, args, last=False):
        self.stream, self.fn, self.args, self.last = stream, fn, args, last
        self.context = contextvars.copy_context()             # np.errstate is in it
        self.result = self.error = None
        self.done = stream.caller.queue()
        self.origin = report.user_line(sys._getframe(2))      # what a report of a hang points at

    def run(self):
        stream, status = self.stream, self.stream.worker.status
        self.error = None if self.last else stream.error
        if self.error is None:
            status.failed = ""
            try:
                self.result = self.context.run(self.fn, *self.args, comm=stream.comm)
            except BaseException as error:                     # noqa: BLE001  (raised by wait)
                self.error = stream.error = error
                status.failed, status.now = f"raised {report.words(error, repr)}", None
        self.fn = self.args = None
        self.done.put(None)

    def wait(self):
        """Block until it has run; return its result, or raise its error here."""
        if self.done is not None:
            status = self.stream.caller.status
            status.now = self.stream.comm, "work", None, None, 0
            try:
                self.done.get()
            finally:
                status.now = None
            self.done = None
        if self.error is not None:
            self.stream.told = True
            raise self.error
        return self.result
