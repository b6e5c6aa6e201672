"""Values between two processes: plain ones copied, arrays and lists mirrored, objects by number.

    plain numbers, text, tuples, slices, dtypes, ufuncs    copied
    arrays, lists, dictionaries                            mirrored: both sides hold one, and what
                                                           one side writes into its own, the next
                                                           frame writes into the other's
    anything else                                          stays where it is, and goes by a number

An array is a view of a buffer: two views of one buffer are so on the other side, too. Mirrors end
with the outermost call, or with the last generator that it returned. A frame is JSON, then bytes;
nothing in it can name code to run.
Both ends use this file: lessons/session.py in the grader, lessons/pupil.py in the other process.
"""
import builtins
import json
import os
import struct

import numpy as np

PLAIN = (type(None), bool, int, float, str)
TYPES = ("bool", "int", "float", "complex", "str", "list", "tuple", "dict", "set")
LARGEST = 1 << 28                                    # bytes of a frame


class Torn(ValueError):
    """A frame that this protocol does not know."""


class Buffer:
    """Memory that both sides hold, and what was in it when they last agreed."""

    def __init__(self, owner, flat):
        self.owner, self.flat = owner, flat           # flat: all of it, as bytes
        self.agreed = flat.tobytes()


class Mirrors:
    """One side's tables.  step: 1 or -1, so that the two sides never give the same number"""

    def __init__(self, step):
        self.step, self.last = step, 0
        self.forget()

    def forget(self):
        """Let go of all arrays and lists: the outermost call has ended."""
        self.buffers, self.boxes = {}, {}             # number -> Buffer; -> (list or dict, agreed)
        self.views = {}                               # what a frame says of an array -> the array
        self.numbers = {}                             # id of a buffer's owner, list or dict

    def number(self, thing):
        self.last += self.step
        self.numbers[id(thing)] = self.last
        return self.last

    # ---- frames

    def pack(self, *message, **head):
        """A frame: what changed here since the last one, then the message.  -> bytes"""
        self.fresh, self.blobs = [], []
        changed = self.changed_buffers(), self.changed_boxes()
        said = [self.encode(part) for part in message]
        text = json.dumps([self.fresh, *changed, said, head]).encode()
        return b"".join([struct.pack("!II", len(text), sum(map(len, self.blobs))), text,
                         *self.blobs])

    def unpack(self, text, blob):
        """Apply the other side's changes.  -> message, head.  Raises Torn"""
        try:
            fresh, arrays, boxes, said, head = json.loads(text)
            if head.get("forget"):
                self.forget()
            self.at, self.blob = 0, blob
            for number, size in arrays:
                self.overwrite(self.buffers[number], self.take(size))
            for number, dtype, size in fresh:
                flat = np.frombuffer(self.take(size), numeric(dtype)).copy()
                self.numbers[id(flat)] = number
                self.buffers[number] = Buffer(flat, flat.view("u1"))
            for number, entries in boxes:
                self.refill(number, entries)
            return [self.decode(part) for part in said], head
        except (KeyError, IndexError, TypeError, ValueError, AttributeError,
                RecursionError) as error:
            raise Torn(f"{type(error).__name__}: {error}") from None

    def take(self, size):
        self.at += size
        if self.at > len(self.blob):
            raise Torn("a frame is shorter than it says")
        return self.blob[self.at - size:self.at]

    def changed_buffers(self):
        changed = []
        for number, buffer in self.buffers.items():
            now = buffer.flat.tobytes()
            if now != buffer.agreed:
                buffer.agreed = now
                self.blobs.append(now)
                changed.append([number, len(now)])
        return changed

    def overwrite(self, buffer, data):
        if not buffer.flat.flags.writeable:
            raise Torn("it wrote into an array that is read-only here, such as a batch's")
        buffer.flat[...] = np.frombuffer(data, "u1")
        buffer.agreed = bytes(data)

    def changed_boxes(self):
        changed = []
        for number, (box, agreed) in list(self.boxes.items()):
            now = contents(box)
            if len(now) != len(agreed) or any(a is not b for a, b in zip(now, agreed)):
                self.boxes[number] = box, now
                changed.append([number, [self.encode_inside(entry) for entry in now]])
        return changed

    def refill(self, number, entries):
        box, now = self.boxes[number][0], [self.decode(entry) for entry in entries]
        box.clear()
        box.update(zip(now[::2], now[1::2])) if type(box) is dict else box.extend(now)
        self.boxes[number] = box, contents(box)

    # ---- values

    def encode(self, x):
        """A value as JSON.  What only this side can hold goes through self.give"""
        kind = type(x)
        if kind in PLAIN:
            return x
        if kind in (tuple, set, frozenset):
            return [kind.__name__, *map(self.encode, x)]
        if kind in (list, dict):
            return self.encode_box(x)
        if isinstance(x, np.ndarray):
            return self.encode_array(x)
        if kind in (slice, range):
            return [kind.__name__, *map(self.encode, (x.start, x.stop, x.step))]
        return by_name(x) or self.give(x)

    def encode_box(self, box):
        known = self.numbers.get(id(box))
        if known is not None:
            return ["box", known]
        number, now = self.number(box), contents(box)
        self.boxes[number] = box, now
        return [type(box).__name__, number, *map(self.encode_inside, now)]

    def encode_inside(self, x):
        """An entry of a list or dictionary.  A list of nothing but plain values is copied here:
        there may be thousands."""
        copied = type(x) is list and x and all(map(plain, x))
        return ["copy", *map(self.encode, x)] if copied else self.encode(x)

    def encode_array(self, x):
        whole, dtype = owner(x), numeric(x.dtype)
        flat = memory(whole)
        if flat is None:                              # it has gaps: a copy, which is no mirror
            whole = x = np.ascontiguousarray(x)
            flat = memory(whole)
        number = self.numbers.get(id(whole))
        if number is None:
            number = self.number(whole)
            buffer = self.buffers[number] = Buffer(whole, flat.view("u1"))
            self.fresh.append([number, whole.dtype.str, len(buffer.agreed)])
            self.blobs.append(buffer.agreed)
        offset = address(x) - address(flat) if x.size else 0
        said = number, dtype.str, x.shape, x.strides, offset, x.flags.writeable
        self.views[said] = x
        return ["array", *said]

    def decode(self, said):
        """The value that the other side means.  What is a number here goes through self.find"""
        if type(said) in PLAIN:
            return said
        kind, *rest = said
        if kind in DECODERS:
            return DECODERS[kind](*rest)
        if kind in ("list", "dict"):
            return self.decode_box(kind, *rest)
        if kind == "box":
            return self.boxes[rest[0]][0]
        if kind == "array":
            return self.decode_array(*rest)
        inside = getattr(self, "find_" + kind, None)
        if inside is not None:
            return inside(*rest)
        return MADE_OF[kind]([self.decode(part) for part in rest])

    def decode_box(self, kind, number, *entries):
        box = [] if kind == "list" else {}
        self.numbers[id(box)] = number
        self.boxes[number] = box, []
        self.refill(number, entries)
        return box

    def decode_array(self, number, dtype, shape, strides, offset, writeable):
        said = number, dtype, tuple(shape), tuple(strides), offset, writeable
        if said not in self.views:
            whole = memory(self.buffers[number].owner)
            self.views[said] = np.ndarray(shape, numeric(dtype), whole, offset, strides)
            self.views[said].flags.writeable = bool(writeable)
        return self.views[said]


def by_name(x):
    """What JSON says of a value that has no parts; None if it is none."""
    if isinstance(x, np.generic):
        return ["scalar", x.dtype.str, x.tobytes().hex()]
    if isinstance(x, np.dtype):
        return ["dtype", x.str]
    if type(x) is complex:
        return ["complex", x.real, x.imag]
    if type(x) is bytes:
        return ["bytes", x.hex()]
    if x is Ellipsis:
        return ["..."]
    if isinstance(x, np.ufunc) or type(x) is type and issubclass(x, np.generic):
        return ["numpy", x.__name__]
    if type(x) is type and x.__module__ == "builtins" and x.__name__ in TYPES:
        return ["type", x.__name__]
    return None


def plain(x):
    return type(x) in PLAIN or type(x) is tuple and all(map(plain, x))


def contents(box):
    """What a list or dictionary holds, in one list."""
    return [x for pair in box.items() for x in pair] if type(box) is dict else list(box)


def owner(x):
    """The array whose memory a view shows."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def memory(owner):
    """All the memory of an array that owns it, as one row; None if it has gaps."""
    order = sorted(range(owner.ndim), key=lambda i: -owner.strides[i])
    dense = owner.transpose(order)
    return dense.reshape(-1) if dense.flags.c_contiguous else None


def address(x):
    return x.__array_interface__["data"][0]


def numeric(dtype):
    """A dtype of numbers.  Raises TypeError: an object in an array would be an address"""
    dtype = np.dtype(dtype)
    if dtype.kind not in "biufc":
        raise TypeError(f"an array of {dtype} is no array of numbers")
    return dtype


def scalar(dtype, data):
    return np.frombuffer(bytes.fromhex(data), numeric(dtype))[0]


def named(name):
    """A ufunc or a type of numbers of NumPy."""
    found = getattr(np, name)
    if not (isinstance(found, np.ufunc) or isinstance(found, type)
            and issubclass(found, np.generic)):
        raise TypeError(f"np.{name} is no ufunc")
    return found


DECODERS = {"scalar": scalar, "dtype": numeric, "complex": complex, "bytes": bytes.fromhex,
            "...": lambda: Ellipsis, "numpy": named,
            "type": lambda name: getattr(builtins, TYPES[TYPES.index(name)])}
MADE_OF = {"tuple": tuple, "copy": list, "set": set, "frozenset": frozenset,
           "slice": lambda parts: slice(*parts), "range": lambda parts: range(*parts)}


# ---- the pipe

def write(fd, frame):
    view = memoryview(frame)
    while view:
        view = view[os.write(fd, view):]


def read(recv):
    """One frame from recv(at most n bytes) -> bytes.  -> text, blob.  Raises EOFError, Torn"""
    sizes = struct.unpack("!II", exactly(recv, 8))
    if sum(sizes) > LARGEST:
        raise Torn(f"a frame of {sum(sizes):,} bytes")
    return [exactly(recv, size) for size in sizes]


def exactly(recv, size):
    data = bytearray()
    while len(data) < size:
        part = recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
