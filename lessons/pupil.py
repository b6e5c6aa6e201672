"""The reader's process: it runs the reader's functions, and holds nothing of the grader's.

    grader (lessons/session.py)                         this process, one for each rank
    the lesson's proof calls the exercise   -- call -->  the reader's function runs
    the library does what is asked          <-- ask --   it uses a Tensor, a group, a library name
    ...                                     -- reply ->
    the proof goes on with the result       <- return -

`import minidist` gives names only: what they mean stays with the grader, source and all. What this
process may do is limited by lessons/fence.py, before the reader's file is run.
"""
import builtins
import functools
import importlib.abc
import importlib.machinery
import os
import shutil
import sys
import threading
import time
import types
import weakref

import numpy as np

# These two files are all of ours that this process sees: no package, but for this moment.
sys.modules["lessons"] = types.ModuleType("lessons")
sys.modules["lessons"].__path__ = [os.path.dirname(os.path.abspath(__file__))]
from lessons import fence, mirrors  # noqa: E402

for name in [name for name in sys.modules if name.startswith("lessons")]:
    del sys.modules[name]


class Remote:
    """An object of the grader's: what is done with it is done there."""
    __slots__ = ("_number", "_times", "_known", "__weakref__")
    __array_ufunc__ = None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        known = object.__getattribute__(self, "_known")
        return known[name] if name in known else home.ask("get", self, name)

    def __setattr__(self, name, value):
        home.ask("set", self, name, value)

    def __call__(self, *args, **named):
        return home.ask("call", self, args, named)

    def __exit__(self, kind, error, trace):
        return home.ask("exit", self, str(error) if kind else None)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(home.ask("array", self), dtype)

    def __repr__(self):
        return home.ask("repr", self)

    def __hash__(self):
        return self._number

    def __del__(self):
        home.dropped.append([self._number, self._times])


def operator(name):
    return lambda self, *args: home.ask("operator", name, self, *args)


for name in ("getitem setitem delitem len iter next contains bool enter instancecheck index float "
             "int add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg "
             "eq ne lt le gt ge").split():
    setattr(Remote, f"__{name}__", operator(name))


class Home(mirrors.Mirrors):
    """The conversation with the grader, over the pipe."""

    def __init__(self, fd):
        super().__init__(-1)
        self.fd, self.lock = fd, threading.RLock()
        self.remotes, self.functions, self.dropped, self.refused = {}, {}, [], []
        self.mine, self.file = None, ""

    def ask(self, *request):
        """Have the grader do something; run what it calls meanwhile.  -> its answer"""
        with self.lock:
            self.say("ask", *request)
            return self.listen()

    def say(self, kind, *message):
        dropped, self.dropped = self.dropped, []
        mirrors.write(self.fd, self.pack(kind, *message, dropped=dropped, refused=self.refused,
                                         line=self.line(sys._getframe(1))))

    def listen(self):
        """Serve calls until an answer comes."""
        while True:
            try:
                (kind, *message), head = self.unpack(
                    *mirrors.read(functools.partial(os.read, self.fd)))
            except EOFError:
                os._exit(0)                                # the grader has gone
            for number in head.get("dropped", ()):
                self.functions.pop(number, None)
            if kind == "reply":
                return message[0]
            if kind == "error":
                name, text = message
                raise known_error(name)(text)
            if kind == "leave":
                raise Left
            self.serve(kind, *message)

    def serve(self, kind, *message):
        try:
            answer = "return", getattr(self, kind)(*message)
        except BaseException as error:                     # noqa: BLE001  (told to the grader)
            answer = "raise", type(error).__name__, str(error), self.where(error)
        try:
            self.say(*answer)
        except (TypeError, ValueError) as error:           # a result that cannot go there
            self.say("raise", "TypeError", str(error), "")

    # ---- what the grader asks for

    def load(self, source, file, others):
        """Run the reader's file; names of the other exercises mean the library's functions."""
        self.file, self.mine = file, types.ModuleType("mine")
        sys.modules["mine"] = self.mine
        exec(compile(source, file, "exec"), vars(self.mine))
        vars(self.mine).update(others)

    def call(self, target, args, named):
        if isinstance(target, str):
            if not hasattr(self.mine, target):
                raise NameError(f"{target} is not defined")
            target = getattr(self.mine, target)
        return target(*args, **named)

    # ---- values

    def give(self, x):
        """Let the grader know a Remote, or a function of ours, by its number."""
        if type(x) is Remote:
            return ["home", x._number]
        if isinstance(x, types.GeneratorType):
            return self.number_of(x.__next__, "steps")
        if not callable(x):
            raise TypeError(f"a {type(x).__name__} cannot leave this process: give arrays, "
                            "numbers, text, lists, functions, or what the library made")
        return self.number_of(x, "away", [self.encode(held) for held in captured(x)])

    def number_of(self, function, kind, *more):
        number = self.last = self.last - 1
        self.functions[number] = function
        name = getattr(function, "__qualname__", type(function).__name__)
        return [kind, number, name, *more]

    def find_home(self, number, known):
        remote = self.remotes.get(number)
        remote = remote and remote()
        if remote is None:
            remote = object.__new__(Remote)
            for name, value in (("_number", number), ("_times", 0), ("_known", known)):
                object.__setattr__(remote, name, value)
            self.remotes[number] = weakref.ref(remote)
        object.__setattr__(remote, "_times", remote._times + 1)
        return remote

    def find_away(self, number):
        return self.functions[number]

    # ---- places

    def line(self, frame):
        """Where in the reader's file a frame, or one above it, is."""
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return f"{self.file}, line {frame.f_lineno}, in {frame.f_code.co_name}" if frame else ""

    def where(self, error):
        if isinstance(error, SyntaxError) and error.filename == self.file:
            return f"{self.file}, line {error.lineno}"
        trace, found = error.__traceback__, ""
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename == self.file:
                found = f"{self.file}, line {trace.tb_lineno}, in {code.co_name}"
            trace = trace.tb_next
        return found


def end_with(grader):
    """End this process when its grader has gone, even while the reader's function computes."""
    while os.getppid() == grader:
        time.sleep(0.2)
    os._exit(0)


class Left(BaseException):
    """The proof has left what the reader's function asked for, and goes on elsewhere."""


def on_paths(name, function):
    """A function of the system: on a path of the grader's it is done there."""
    @functools.wraps(function)
    def instead(*args, **named):
        if any(type(a) is Remote for a in args):
            return home.ask("system", name, args, named)
        return function(*args, **named)
    return instead


def known_error(name):
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def captured(*things):
    """The arrays and objects of the grader's that functions keep alive: what a backward holds."""
    found, todo, seen = [], list(things), set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if type(thing) is Remote or isinstance(thing, np.ndarray):
            found.append(thing)
        elif isinstance(thing, (tuple, list)):
            todo.extend(thing)
        elif isinstance(thing, dict):
            todo.extend(thing.values())
        elif isinstance(thing, functools.partial):
            todo += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, types.MethodType):
            todo += [thing.__func__, *getattr(thing.__self__, "__dict__", {}).values()]
        elif isinstance(thing, types.FunctionType):
            todo += [cell.cell_contents for cell in thing.__closure__ or () if filled(cell)]
            todo += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    return found


def filled(cell):
    try:
        cell.cell_contents                                 # noqa: B018
        return True
    except ValueError:                                     # a variable that has no value yet
        return False


# ---- what may be imported

def importer(frame):
    """The file that an import, of which this is a frame, is written in."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame and frame.f_code.co_filename


class Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """minidist as names that the grader knows; nothing else beside NumPy and what Python has."""

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top == "minidist":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        python = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if not python and top != "numpy":
            if importer(sys._getframe(1)) == home.file:    # copy and pickle ask for org.python
                home.refused.append(f"imports {name}")
            raise ImportError(f"{name} is not at hand: only NumPy, minidist and what Python has")
        return None

    def create_module(self, spec):
        return Names.Module(spec.name)

    def exec_module(self, module):
        pass

    class Module(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return home.ask("name", self.__name__, name)


if __name__ == "__main__":
    home = Home(int(sys.argv[1]))
    threading.Thread(target=end_with, args=[int(sys.argv[4])], daemon=True).start()
    fence.limit(*map(int, sys.argv[2:4]))
    sys.meta_path.insert(0, Names())
    for name in ("rename", "replace", "remove", "unlink", "mkdir", "rmdir", "listdir"):
        setattr(os, name, on_paths(f"os.{name}", getattr(os, name)))
    shutil.rmtree = on_paths("shutil.rmtree", shutil.rmtree)
    builtins.open = on_paths("open", open)
    # What starts processes, and what guards this one, is nowhere to be found by name.
    sys.modules["_posixsubprocess"] = types.ModuleType("_posixsubprocess")
    sys.modules["_posixsubprocess"].fork_exec = None
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.addaudithook(fence.guard(os.getcwd(), home.refused))
    del fence
    home.listen()
