"""Files of commands: what can be known is known before the work; one failure is one file's.

    before   ready(data, picture, keep=(text,))     can they be written, without spoiling anything?
             drawable()                             does matplotlib start here?
    after    deliver(("data", path, numbers(x)),    the data first, pictures last; what cannot be
                     ("picture", path, picture(f))) written is a sentence, and the next one's turn

A plain file is replaced in one piece: under its name are the old numbers or the new ones. What is
no plain file of one's own (a device, a pipe, a name among others) is written through, never
replaced; a symbolic link stays, and what it points to is written.

Lesson: python -m lessons.step
"""
import errno
import io
import json
import math
import os
import secrets
import stat
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from minidist import BadInput


class NotWritten(Exception):
    """A file that could not be written, in one sentence."""


# ---------------------------------------------------------------------------- before the work

def ready(*paths, keep=()):
    """Refuse what `write` could not write, and what would overwrite another.  Leaves nothing behind

    paths: None where nothing is to be written; keep: files that are read."""
    paths = [Path(path) for path in paths if path]
    for path in paths:
        try:
            look(path)
        except OSError as error:
            raise BadInput(f"cannot write {path}: {reason(error)}") from None
    for i, path in enumerate(paths):
        for read in map(Path, filter(None, keep)):
            if collide(path, read):
                raise BadInput(f"{path} cannot be written without loss of {read}, which is read")
        for other in paths[:i]:
            if collide(path, other):
                raise BadInput(f"{other} and {path} cannot both be written; choose another name")


def look(path):
    """Raise OSError for a path that cannot be written; a full disk counts."""
    if path.is_dir():
        raise BadInput(f"{path} is a directory; name a file")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is there, and may not be changed")
    if is_plain(path):
        target = Path(os.path.realpath(path))
        folder = next(p for p in target.parents if p.exists())      # missing folders will be made
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(4096))
        except OSError as error:
            raise OSError(error.errno, f"{folder}: {error.strerror}") from None


def collide(path, other):
    """Are these one file, or would one be a folder and the other a file in it?"""
    a, b = (Path(os.path.realpath(p)) for p in (path, other))
    one_device = path.exists() and not path.is_file()
    return (a == b and not one_device) or a in b.parents or b in a.parents


def drawable():
    """Refuse to draw where matplotlib does not start; some seconds are better than an hour."""
    try:
        figures()
    except Exception as error:                            # whatever an environment makes it raise
        raise BadInput(f"matplotlib does not start here, so there can be no picture: "
                       f"{one_line(error)}") from None


# ----------------------------------------------------------------------------- after the work

def deliver(*outputs):
    """Write (what, path, fill) in this order, each whatever became of the others, and say so.

    No path: nothing is to be written.  -> exit status"""
    written = [deliver_one(what, path, fill) for what, path, fill in outputs if path]
    return 0 if all(written) else 1


def deliver_one(what, path, fill):
    """Write one output and name it, or say on stderr why it is not there.  -> was it written?"""
    if not attempt(path, fill):
        return False
    print(f"{what:10} {path}")
    return True


def attempt(path, fill):
    """Write a file, if it has a name, or say on stderr why not.  -> is nothing missing?"""
    try:
        if path:
            write(path, fill)
    except (OSError, NotWritten) as error:
        print(f"error: cannot write {path}: {reason(error)}", file=sys.stderr)
        return False
    return True


def write(path, fill):
    """Call fill(file), in binary, and put the file in its place when it is complete."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if is_plain(path):
        return replace(Path(os.path.realpath(path)), fill)
    content, descriptor = io.BytesIO(), printed_to(path)
    fill(content)
    with open(descriptor or path, "wb", closefd=descriptor is None) as file:
        file.write(content.getbuffer())


def replace(path, fill):
    """Write a draft in the same folder, and give it the name when it is complete."""
    draft = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(draft, "xb") as file:
            fill(file)
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def is_plain(path):
    """May the file be replaced by another of its name?  It is not there, or plain and ours."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return True
    ours = found.st_uid == os.geteuid() and found.st_nlink == 1
    folder = os.path.dirname(os.path.realpath(path))
    return (stat.S_ISREG(found.st_mode) and ours and printed_to(path) is None
            and os.access(folder, os.W_OK))


def printed_to(path):
    """Find the descriptor, 1 or 2, that prints to this file: writing to it cuts nothing off."""
    for descriptor in (1, 2):
        try:
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except OSError:                                   # a descriptor that is closed
            pass
    return None


# ------------------------------------------------------------------------- what is written

def numbers(data):
    """Make what `write` needs for data as JSON."""
    text = json.dumps(finite(data), indent=1, allow_nan=False)
    return lambda file: file.write(text.encode())


def finite(data):
    """Replace numbers that JSON does not have, infinity and NaN, by null."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def picture(draw, *data, size=(9, 5), dpi=110):
    """Make what `write` needs for a PNG of what draw(figure, *data) puts on an empty figure."""
    def fill(file):
        try:
            Figure = figures()
            with own_style():
                figure = Figure(figsize=size, layout="constrained")
                draw(figure, *data)
                figure.savefig(file, dpi=dpi, format="png")
        except OSError:
            raise
        except Exception as error:                        # a font, say: no reason to lose the rest
            raise NotWritten(one_line(error)) from error
    return fill


@contextmanager
def own_style():
    """Draw with matplotlib's own settings, whatever this user's are."""
    import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def figures():
    """Import matplotlib's Figure, without a notebook's word on which window it should draw in."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.figure import Figure              # no pyplot: no window, no global state
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    return Figure


def reason(error):
    """What is wrong, in the system's words where it has some."""
    own = str(error) if isinstance(error, NotWritten) else one_line(error)
    return getattr(error, "strerror", None) or own


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
