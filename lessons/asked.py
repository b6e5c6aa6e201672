"""What a reader's process may ask of the grader, and what is never given away.

A process uses the library's objects that it was given: their public attributes and methods, and
the names that lessons/judge.py allows. It never gets a module, a function's inside, or a way to
write into what counts messages, predicts them, or is shared by all ranks.
"""
import copy
import operator
import types
import weakref
from functools import partial
from pathlib import PurePath

import numpy as np

from lessons import mirrors
from minidist.ranks.comm import Comm
from minidist.ranks.stream import Stream, Work

OF_COMM = set("rank size name axes send recv sendrecv shift isend irecv exchange barrier split "
              "stream operation label scratch closed".split())
OF_STREAM = {"submit", "comm", "closed", "wait", "result"}
OF_TUPLE = {"_replace", "_asdict", "_fields"}         # of a named one
OPAQUE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
          types.GeneratorType, types.FrameType, types.CodeType, types.TracebackType, partial)
OPERATORS = set("getitem setitem delitem contains enter add radd sub rsub mul rmul truediv "
                "rtruediv matmul rmatmul pow neg".split())
COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
BUILT_IN = {"len": len, "iter": iter, "next": next, "bool": bool, "index": int, "float": float,
            "int": int}
AS_IT_IS = ("minidist.ranks", "minidist.cost", "minidist.collectives", "minidist.mesh")
KEPT = {}                                            # id of an array's owner -> weak ref


class Asked:
    """Do what a process asks for: do_get(object, name) and so on."""

    def do_name(self, module, name):
        return self.task.look_up(module, name)

    def do_get(self, thing, name):
        if isinstance(thing, PurePath):
            self.reach.attribute(thing, name)
        allowed = OF_COMM if isinstance(thing, Comm) else (
            OF_STREAM if isinstance(thing, (Stream, Work)) else {name})
        private = name.startswith("_") and not (isinstance(thing, tuple) and name in OF_TUPLE)
        if private or name not in allowed or isinstance(thing, OPAQUE):
            raise AttributeError(f"a {type(thing).__name__} has no {name} that an exercise needs")
        return getattr(thing, name)

    def do_set(self, thing, name, value):
        home = type(thing).__module__
        if name.startswith("_") or not home.startswith(("minidist.", "numpy.random")) or (
                home.startswith(AS_IT_IS)):
            raise AttributeError(f"a {type(thing).__name__} has no {name} to set")
        setattr(thing, name, value)

    def do_call(self, thing, args, named):
        self.reach.call(thing, args, named)
        found = placed(call, self.line)(thing, args, named)
        return alone(found) if hasattr(thing, "cache_clear") else found

    def do_system(self, name, args, named):
        return self.reach.system(name, args, named)

    def do_operator(self, name, thing, *args):
        if name == "instancecheck":
            return isinstance(args[0], thing)
        if name in BUILT_IN:
            return BUILT_IN[name](thing, *args)
        if name in COMPARED:
            return getattr(operator, name)(thing, *args)
        if name not in OPERATORS:
            raise TypeError(f"no operator {name}")
        return getattr(type(thing), f"__{name}__")(thing, *args)

    def do_exit(self, thing, error):
        raised = None if error is None else RuntimeError(error)
        return type(thing).__exit__(thing, raised and RuntimeError, raised, None)

    def do_array(self, thing):
        return np.asarray(thing)

    def do_repr(self, thing):
        return repr(thing)


def call(thing, args, named):
    return thing(*args, **named)


def placed(function, line):
    """A function as if it were written in this line of the reader's file: reports show that."""
    try:
        file, number, name = line.split(", ")
        number, name = int(number.removeprefix("line ")), name.removeprefix("in ")
        code = function.__code__.replace(co_filename=file, co_name=name,
                                         co_firstlineno=max(1, number - 1))
    except (ValueError, OverflowError):
        return function
    return types.FunctionType(code, function.__globals__)


def alone(value):
    """A list, table or array that is not the library's own: what all ranks see stays as it is."""
    shared = isinstance(value, (list, dict, set, np.ndarray))
    return copy.deepcopy(value) if shared else value


def keep(array):
    """Let no process write into an array, or what it is a view of."""
    owner = mirrors.owner(array)
    KEPT[id(owner)] = weakref.ref(owner)
