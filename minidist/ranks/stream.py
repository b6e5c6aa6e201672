"""A background stream: one thread and one communicator, for messages under way while we compute.

    compute  |-- backward of layer 3 --|-- layer 2 --|-- layer 1 --|  wait  |
    stream                             |=== all_reduce 3 ===|= all_reduce 2 =|

What is submitted runs strictly in order, so every rank's stream makes the same calls in the same
order, as a CUDA stream does for NCCL. MPI moves large messages only inside its calls: a thread that
sits in the call is what makes the overlap real (NumPy's matrix products release the interpreter).
"""
import sys
import threading

from minidist.ranks import report
from minidist.ranks.threads import Stopped


class Stream:
    """Runs functions in order on a thread of its own.  comm: the communicator they are given"""

    def __init__(self, comm, caller):
        self.comm, self.caller, self.error = comm, caller, None
        self.status, self.queue = comm._status, comm._raw[0].queue()
        self.status.idle = True
        caller.streams.append(self)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def submit(self, fn, *args):
        """Run fn(*args, comm=stream.comm) after everything submitted before -> Work"""
        work = Work(self, fn, args)
        self.queue.put(work)
        return work

    def close(self):
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


class Work:
    """Something submitted to a Stream.  After an error the stream runs nothing more"""

    def __init__(self, stream, fn, args):
        self.stream, self.fn, self.args, self.result = stream, fn, args, None
        self.done = stream.caller.queue()
        self.origin = report.user_line(sys._getframe(2))      # what a report of a hang points at

    def run(self):
        stream = self.stream
        if stream.error is None:
            try:
                self.result = self.fn(*self.args, comm=stream.comm)
            except BaseException as error:                     # noqa: BLE001  (raised by wait)
                stream.error, stream.status.end = error, f"raised {error!r}"
                stream.status.now = None
        self.error, self.fn, self.args = stream.error, None, None
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
            raise self.error
        return self.result
