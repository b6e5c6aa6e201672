"""Files that a reader's function may reach through the grader: below the folder it was given.

An exercise that writes files gets a Path. What it does with that Path is done by the grader, where
the lesson watches: os.rename(part, target) as well as part.read_text(). Every path that it makes
must stay in the folder that the given one is in.
"""
import os
import shutil
from pathlib import Path, PurePath

PURE = set("name parent parts stem suffix with_name with_suffix with_stem joinpath".split())
REAL = set("exists is_file is_dir read_text read_bytes write_text write_bytes open mkdir unlink "
           "rmdir iterdir glob rename replace touch".split())
WRITE = {"minidist.storage", "minidist.offload", "minidist.checkpoint", "minidist.files"}
SYSTEM = {"os.rename": os, "os.replace": os, "os.remove": os, "os.unlink": os, "os.mkdir": os,
          "os.rmdir": os, "os.listdir": os, "shutil.rmtree": shutil}


class Reach:
    """The folders in reach of one process."""

    def __init__(self):
        self.roots = set()

    def give(self, args):
        """Let it reach what the proof hands it."""
        self.roots |= {os.path.realpath(a.parent) for a in args if isinstance(a, Path)}

    def check(self, *paths):
        for path in paths:
            real = os.path.realpath(path)
            if not any(real == root or real.startswith(root + os.sep) for root in self.roots):
                raise ValueError(f"{path} is outside of the folder that it was given")

    def attribute(self, path, name):
        """May it have path.name?"""
        if name in REAL:
            self.check(path)
        elif name not in PURE:
            raise AttributeError(f"a path has no {name} that an exercise needs")

    def call(self, thing, args, named):
        """May it call this?  Paths among the arguments must be in reach; text is no path."""
        given = [*args, *named.values()]
        self.check(*(a for a in given if isinstance(a, PurePath)))
        texts = [a for a in given if isinstance(a, str)]
        method = isinstance(getattr(thing, "__self__", None), PurePath)
        if method and thing.__name__ in ("rename", "replace") and texts:
            raise ValueError("the new name must be a path made from the given one")
        if getattr(thing, "__module__", "") in WRITE and texts:
            if not isinstance(args[0], PurePath) or any(os.sep in text for text in texts):
                raise ValueError("a path must be made from the given one")

    def system(self, name, args, named):
        """A function of the system, on paths in reach."""
        if not all(isinstance(a, PurePath) for a in args[:2 if name in PAIRS else 1]):
            raise ValueError(f"{name} needs paths made from the given one")
        self.check(*(a for a in args if isinstance(a, PurePath)))
        if name == "open":
            return open(*args, **named)
        return getattr(SYSTEM[name], name.split(".")[1])(*args, **named)


PAIRS = {"os.rename", "os.replace"}
