"""What the reader's process may not do: limits that the system keeps, and a hook that refuses.

Limits end a function that computes, takes or writes too much. The hook sees what Python is about to
do (PEP 578) and refuses other processes, the network, files outside the folder that the process
starts in, and imports of what neither Python nor NumPy brings. It ends mistakes and the usual
cheats; it is no sandbox against an attacker.
"""
import os
import sys
import threading

import numpy as np

try:
    import resource
except ImportError:                                        # a platform that has no such limits
    resource = None

KINDS = {"CPU": "computing time", "AS": "memory", "FSIZE": "sizes of files", "NPROC": "processes",
         "NOFILE": "open files", "CORE": "core files"}


def lacking():
    """Name what this platform does not limit."""
    missing = [what for name, what in KINDS.items() if not hasattr(resource, "RLIMIT_" + name)]
    return missing + ["memory"] * (sys.platform == "darwin")           # known there, and ignored


def limit(seconds, megabytes):
    """Set the limits, for good."""
    most = dict(CPU=seconds, AS=megabytes << 20, FSIZE=1 << 20, NPROC=0, NOFILE=64, CORE=0)
    for name, soft in most.items():
        kind = getattr(resource, "RLIMIT_" + name, None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
            try:
                resource.setrlimit(kind, (soft, soft + (name == "CPU")))
            except (ValueError, OSError):                  # macOS knows some names only
                pass


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "pty.spawn",
         "subprocess.", "socket.", "signal.", "ctypes.", "resource.", "syslog.", "gc.get_")
IN_FOLDER = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod",
             "os.chown", "os.truncate", "os.utime", "shutil.")
# Modules that open files or start processes without a word to the hook, beside C functions.
UNKNOWN = set("ctypes _ctypes multiprocessing _multiprocessing _posixshmem _posixsubprocess "
              "readline sqlite3 _sqlite3 dbm _dbm _gdbm _interpreters _xxsubinterpreters".split())


def guard(folder, refused):
    """Make the hook.  refused: what it has refused, for the grader to know

    A closure: as an object it could be found by its class, and told to refuse nothing."""
    folder, inside = os.path.realpath(folder), threading.local()
    brought = [os.path.realpath(os.path.dirname(module.__file__)) for module in (np, os)]
    zipped = {os.path.realpath(path) for path in sys.path if path.endswith(".zip")}

    def hook(event, args):
        if getattr(inside, "now", False):
            return
        inside.now = True
        try:
            what = wrong(event, args, folder, (*brought, zipped))
        finally:
            inside.now = False
        if what:
            refused.append(what)
            raise PermissionError(f"{what}: an exercise needs no such thing")
    return hook


def wrong(event, args, folder, brought):
    """Say what is wrong with what Python is about to do; nothing, mostly."""
    if event == "open":
        return opens(*args, folder, brought)
    if event == "import" and args[0] in UNKNOWN:
        return f"imports {args[0]}"
    if event.startswith(NEVER):
        return f"uses {event}"
    paths = [a for a in args if isinstance(a, (str, bytes, os.PathLike))]
    if event.startswith(IN_FOLDER) and not all(below(real(path), folder) for path in paths):
        return f"{event} outside its folder"


def opens(path, mode, flags, folder, brought):
    if isinstance(path, int) or path in ("/dev/null", "/dev/urandom") or below(real(path), folder):
        return None
    writes = set(mode or "") & set("wax+") or (flags or 0) & WRITING
    if writes:
        return f"writes {os.fsdecode(path)}"
    return None if is_python(real(path), *brought) else f"reads {os.fsdecode(path)}"


def is_python(path, numpy, python, zipped):
    """Does Python or NumPy bring this file?"""
    if path in zipped or below(path, numpy) or path.startswith(numpy + "-"):    # its dist-info
        return True
    return below(path, python) and not ("site-packages" in path or "dist-packages" in path)


def real(path):
    return os.path.realpath(os.fsdecode(path))


def below(path, root):
    return path == root or path.startswith(root + os.sep)
