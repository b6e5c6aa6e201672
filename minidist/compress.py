"""Compression: send less than the gradient, remember what was left out, and send that later.

    gradient g  --+-->  x  --send-->  what my share of the sum says, c  -->  the sum, on every rank
                  |                        |
       left, e  --+                        |
                  ^--------  x - c  -------+           error feedback: nothing is lost, only late

A bucket of DistributedDataParallel is summed by one of four, the same bits on every rank:

    fp16             numbers of 16 bits, scaled by a power of two so that their sum cannot overflow
    1bit             a sign for each number, a mean size for each tensor; whoever adds up a chunk
                     compresses its sum again, with a memory of its own
    topk:0.01        the largest hundredth, as numbers and places; places differ from rank to rank,
                     so they are gathered, not summed
    powersgd:2       a matrix as P Q', of rank 2; Q of this step is where the next one begins

Without error feedback, what is too small in every step never arrives. The training is another one
than that of plain sums: compression trades exactness, and compute, for bandwidth. The first steps,
where gradients are large and turn, are better left alone.

Price per step and rank, of n numbers: see cost.compressed.  Memory: left, as large as the gradient.

Lesson: mpirun -n 4 python -m lessons.compress
Papers: Karimireddy et al. 2019, "Error feedback fixes SignSGD"; Vogels et al. 2019, "PowerSGD";
        Lin et al. 2018, "Deep gradient compression"; Tang et al. 2021, "1-bit Adam"
"""
import numpy as np

from minidist import BadInput
from minidist.collectives import all_gather, all_reduce, all_to_all
from minidist.cost import chunks, kept, low_rank
from minidist.engine.nn import init

HALF = 2.0 ** 15                            # sums stay below, float16 ends at 65504


def feedback(x, left, send):
    """Send x and what was left out before; keep what is left out now.  [n] -> sum over ranks [n]

    send(array) -> my share of the sum, the sum: [n] each.  left [n]: changed in place."""
    x = x + left
    mine, total = send(x)
    left[...] = x - mine
    return total


class Compressor:
    """Sum buckets over ranks, about; one memory of what was left out for each bucket.

    after: how many steps are summed as they are, before any is compressed."""
    after = 0

    def __init__(self):
        self.left = {}                      # first parameter of a bucket -> [n]
        self.steps = {}                     # the same -> how many there were

    def __call__(self, bucket, comm):
        """Put the sum into the bucket, in place.  Collective"""
        key = bucket.params[0].name
        self.steps[key] = self.steps.get(key, 0) + 1
        if self.steps[key] <= self.after:
            all_reduce(bucket.flat, comm, out=bucket.flat)
            return
        bucket.used[...] = all_reduce(bucket.used.copy(), comm)
        flat = bucket.flat[:-len(bucket.params)]
        left = self.left.setdefault(key, np.zeros_like(flat))
        waiting = [(bucket.columns[p.name], left[bucket.columns[p.name]].copy())
                   for p, users in zip(bucket.params, bucket.used[0]) if not users]
        for column, _ in waiting:           # no rank has a gradient: nothing of it is sent
            left[column] = 0
        flat[...] = feedback(flat, left, lambda x: self.send(x, bucket, comm))
        for column, owed in waiting:
            left[column] = owed


class Half(Compressor):
    """Numbers of 16 bits."""

    def send(self, x, bucket, comm):
        scale = x.dtype.type(power_of_two(x, comm))
        half = (x * scale).astype(np.float16)
        mine = half.astype(x.dtype) / scale
        return mine, all_reduce(half, comm).astype(x.dtype) / scale


def power_of_two(x, comm):
    """Find a scale with which no sum over ranks overflows float16.  Collective"""
    top = float(all_reduce(np.array([np.abs(x).max(initial=0)], np.float64), comm, op="max")[0])
    if not 0 < top < np.inf:
        return 1.0
    return 2.0 ** np.floor(np.log2(HALF / top / comm.size))


class OneBit(Compressor):
    """Signs, and the mean size of each tensor's numbers."""

    def __init__(self):
        super().__init__()
        self.owed = {}                      # what was left out of my chunk of each bucket's sum

    def send(self, x, bucket, comm):
        tensor = np.repeat(np.arange(len(bucket.params)), [p.size for p in bucket.params])
        sizes, count = chunks(x.size, comm.size), len(bucket.params)
        ends = np.cumsum(sizes)
        pieces = [slice(end - size, end) for size, end in zip(sizes, ends)]
        own = pieces[comm.rank]

        bits, scale = signs(x, tensor, count)
        scales = all_gather(scale, comm).reshape(comm.size, count)
        came = all_to_all([np.packbits(bits[piece]) for piece in pieces], comm,
                          [packed(sizes[comm.rank])] * comm.size, algorithm="pairwise")
        y = sum(unpacked(theirs, of[tensor[own]]) for theirs, of in zip(came, scales))

        owed = self.owed.setdefault(bucket.params[0].name, np.zeros_like(y))
        again, second = signs(y + owed, tensor[own], count)
        owed += y - unpacked(np.packbits(again), second[tensor[own]])
        seconds = all_gather(second, comm).reshape(comm.size, count)
        texts = all_gather(np.packbits(again), comm, sizes=[packed(size)[0] for size in sizes])
        total, at = np.empty_like(x), 0
        for piece, size, of in zip(pieces, sizes, seconds):
            length, = packed(size)
            total[piece] = unpacked(texts[at:at + length], of[tensor[piece]])
            at += length
        return np.where(bits, -1, 1) * scale[tensor], total


def signs(x, tensor, count):
    """Take a sign of each number, and each tensor's mean size.  [n] -> is it < 0 [n], [count]"""
    sums = np.bincount(tensor, np.abs(x), count)
    return x < 0, (sums / np.maximum(np.bincount(tensor, minlength=count), 1)).astype(x.dtype)


def packed(size):
    """The shape of so many bits in bytes."""
    return (-(-size // 8),)


def unpacked(text, sizes):
    """Give each bit's number its size.  [n/8], [n] -> [n]"""
    return np.where(np.unpackbits(text, count=len(sizes)), -sizes, sizes)


class TopK(Compressor):
    """The largest numbers, and their places."""

    def __init__(self, fraction=0.01):
        super().__init__()
        self.fraction = fraction

    def send(self, x, bucket, comm):
        places = largest(x, kept(x.size, self.fraction))
        numbers = all_gather(x[places], comm).reshape(comm.size, -1)
        where = all_gather(places.astype(np.int32), comm).reshape(comm.size, -1)
        mine = np.zeros_like(x)
        mine[places] = x[places]
        return mine, merged(numbers, where, x.size)


def largest(x, k):
    """Find the places of the k numbers that are largest in size, in order.  [n] -> [k]"""
    return np.sort(np.argpartition(np.abs(x), x.size - k)[x.size - k:])


def merged(numbers, places, n):
    """Add up what all ranks have sent.  [p, k], [p, k] -> [n]

    The places of a rank differ from one another, those of two ranks may be the same."""
    total = np.zeros(n, numbers.dtype)
    for mine, there in zip(numbers, places):
        total[there] += mine
    return total


class PowerSGD(Compressor):
    """Matrices as products of two narrow ones; what would not get smaller is summed as it is."""

    def __init__(self, rank=2):
        super().__init__()
        self.rank, self.right = rank, {}    # name -> Q of the last step

    def send(self, x, bucket, comm):
        narrow = {p.name: low_rank(p.shape, self.rank) for p in bucket.params}
        columns = {name: bucket.columns[name] for name, sizes in narrow.items() if sizes}
        plain = np.ones(x.size, bool)
        for column in columns.values():
            plain[column] = False
        mine, total = x.copy(), np.empty_like(x)
        total[plain] = all_reduce(x[plain], comm)
        M = {name: x[column].reshape(narrow[name][0], -1) for name, column in columns.items()}
        P = summed({name: m @ self.begin(name, m) for name, m in M.items()}, comm)
        P = {name: orthogonal(each) for name, each in P.items()}
        own = {name: m.T @ P[name] for name, m in M.items()}
        self.right.update(summed(own, comm))
        for name, column in columns.items():
            mine[column] = (P[name] @ own[name].T).reshape(-1)
            total[column] = (P[name] @ self.right[name].T).reshape(-1)
        return mine, total

    def begin(self, name, m):
        """Q to begin with: that of the last step, or the same random one on all ranks."""
        q = self.right.get(name)
        if q is None or not q.any():
            r = low_rank(m.shape, self.rank)[2]
            q = init(f"powersgd.{name}", (m.shape[1], r), dtype=m.dtype)
        return q


def summed(arrays, comm):
    """Sum several arrays over ranks in one message.  {name: array} -> the same"""
    if not arrays:
        return {}
    flat = all_reduce(np.concatenate([a.reshape(-1) for a in arrays.values()]), comm)
    ends = np.cumsum([a.size for a in arrays.values()])
    return {name: part.reshape(a.shape)
            for (name, a), part in zip(arrays.items(), np.split(flat, ends[:-1]))}


def orthogonal(p, tiny=1e-30):
    """Make the columns orthonormal, one after the other; one of zeros stays zero.  [n, r]"""
    p = p.copy()
    for i in range(p.shape[1]):
        for _ in range(2):                  # once more, for what rounding has left
            p[:, i] -= p[:, :i] @ (p[:, :i].T @ p[:, i])
        norm = np.sqrt(p[:, i] @ p[:, i])
        p[:, i] = p[:, i] / norm if norm > tiny else 0
    return p


FORMS = {"fp16": (Half,), "1bit": (OneBit,), "topk": (TopK, float, 0, 1),
         "powersgd": (PowerSGD, int, 1, 1 << 20)}


def make(form):
    """Read what --compress says, such as topk:0.01.  -> Compressor; BadInput"""
    name, colon, number = form.partition(":")
    if name not in FORMS or colon and len(FORMS[name]) == 1:
        raise BadInput(f"there is no compression {form!r}; use fp16, 1bit, topk:FRACTION or "
                       "powersgd:RANK")
    kind, *range_ = FORMS[name]
    if not colon:
        return kind()
    read, least, most = range_
    try:
        value = read(number)
    except ValueError:
        value = None
    if value is None or not least < value + (read is int) <= most + (read is int):
        raise BadInput(f"{name} takes a number above {least} and up to {most}, not {number!r}"
                       if read is float else f"{name} takes a whole number from 1, not {number!r}")
    return kind(value)


def use(model, form, after=0):
    """Let DistributedDataParallel sum its buckets so, after a number of plain steps."""
    model.compressor = make(form)
    model.compressor.after = after
    return model
