"""OFFLOAD      The optimizer's state is used once per step. Must it be here all the time?

  lifts   memory      12 of 16 bytes per parameter, all but two chunks of them, lie elsewhere
  costs   bandwidth   every step moves them here and back, over a link that is tens of times slower
  code    minidist/offload.py
  run     mpirun -n 4 python -m lessons.offload       or: python -m lessons.offload -n 4
"""
from lessons import elsewhere, kit, setting
from lessons.elsewhere import CHUNK, ROWS
from minidist import cost, offload, parallel, verify, zero

EXERCISE = [offload.cut, offload.pass_by]
LINKS = {"device memory": 3e12, "PCIe": 64e9, "NVMe": 7e9}           # bytes per second, one way
GPU, N_GPT3 = 989e12, cost.gpt_parameters(cost.GPT3)                 # an H100's flops, dense bf16


def two_bandwidths(lesson):
    """The two bandwidths

    Memory on a GPU moves 3 TB/s; the link to the CPU's memory 64 GB/s, a fast disk 7. Mixed
    precision keeps 12 bytes per parameter that only the optimizer reads: GPT-3's are 2.1 TB."""
    lesson.predict("GPT-3's 2.1 TB over one PCIe link, one way. Seconds?", round(
        12 * N_GPT3 / 64e9), "s", why="2.1e12 / 64e9", mistakes={300: "that is a disk's 7 GB/s"})
    memory, disk = lesson.share(elsewhere.speeds)
    rows = [*LINKS.items(), ("this machine, a copy", memory), ("this machine, a file", disk)]
    lesson.table(["", "GB/s", "GPT-3's state there and back", "1B's"],
                 [[name, f"{speed / 1e9:,.4g}", *(f"{24 * n / speed:,.3f} s"
                                                  for n in (N_GPT3, 1e9))] for name, speed in rows])
    lesson.say("""
        A file that was just written is still in memory: its row is not a disk's speed.""")


def two_buffers(lesson):
    """Two buffers, one thread

    The state is cut into chunks. While one is updated, a thread takes the one before back and then
    brings the one after, into the same buffer. Here the thread does nothing before it must:"""
    seen, _ = elsewhere.followed(4)
    lesson.table(["update of chunk", "in buffer", "still to be done, in this order"],
                 [[i, "AB"[which], ", then ".join(jobs)] for i, which, _, _, jobs in seen])
    lesson.say("""
        Chunk i + 1 comes into the buffer that chunk i - 1 goes back from: order is all that
        protects it. No update before its chunk is here, no chunk comes before one is back.""")


def flops_per_byte(lesson):
    """How many tokens make it free?

    A step takes 6 n N flops, n parameters, N tokens; the state moves 24 n bytes, there and back.
    If both at once take as long, n is no matter: only flops per second over bytes per second is."""
    lesson.predict("A GPU of 989 Tflop/s, a link of 64 GB/s: how many tokens, at the least?",
                   round(4 * GPU / 64e9), "tokens", why="6 N / 989e12 = 24 / 64e9",
                   mistakes={15453: "that is flops per byte; each token gives 6, for 24 bytes"})
    lesson.table(["tokens per GPU and step", "bytes per parameter", "1 GPU", "8, ZeRO", "64, ZeRO"],
                 [[f"{what}, {link}", per, *(f"{per / 6 * GPU / LINKS[link] / p:,.0f}"
                                             for p in (1, 8, 64))]
                  for what, per in (("state", 24), ("state and parameters", 30))
                  for link in ("PCIe", "NVMe")])
    lesson.fill("""
        ZeRO divides the bytes by the GPUs, each with a link of its own. Parameters of 16 bits add
        6 bytes: read for forward and for backward, written once.""")


def what_is_here(lesson):
    """What is here, what is there

    With ZeRO's stage 3 a rank's pieces of the parameters lie there, too. Whoever gathers a part of
    the model reads them, in the background, while the part before computes. Bytes of each rank:"""
    here = [elsewhere.moved(lesson.comm, stage) for stage in (0, 1, 3)]
    names = "dp", "ZeRO 1", "ZeRO 3, parameters too"
    lesson.table(["", "elsewhere", "read in a step", "written", "two chunks, here"],
                 [[name, *map("{:,}".format, row)] for name, row in zip(names, here)])
    lesson.figure(bars, here, names)


def prove(lesson):
    """Is it right, and what moves?"""
    comm = lesson.comm
    lesson.check("cut: full chunks, every number once", elsewhere.miscut())
    for at_once, name in ((False, "a slow thread"), (True, "a fast one")):
        lesson.check(f"{name}: chunks not here, or not back", elsewhere.faults(at_once))
    lesson.check("chunks that could not be put back, and nobody hears", elsewhere.untold())
    lesson.check("updates beside which a neighbour does not travel", elsewhere.idle())
    lesson.check("dp, SGD, host memory: as if it were here, bit for bit",
                 elsewhere.apart(comm, 0, momentum, offload.Host))
    lesson.check("ZeRO 3, AdamW, a file: as if it were here, bit for bit",
                 elsewhere.apart(comm, 3, setting.ADAMW, elsewhere.file()))
    params, p = setting.shallow().parameters(), comm.size
    pieces = [-(-x.size // p) for x in params]
    plain, split = elsewhere.moved(comm, 0), elsewhere.moved(comm, 3, passes=2)
    lesson.ledger(("elsewhere", "2 8 n", None, plain[0]),
                  ("read in a step", "2 8 n", None, plain[1]),
                  ("written in a step", "2 8 n", None, plain[2]),
                  ("two chunks of two moments", "2 2 C", None, plain[3]),
                  ("stage 3, m = 2: read", "3 8 k + 2 2 8 (k+t)", None, split[1]),
                  ("stage 3: written", "3 8 k", None, split[2]),
                  n=sum(x.size for x in params), k=sum(pieces), t=pieces[0], C=CHUNK)
    lesson.verdict(verify.train(
        setting.shallow, setting.ADAMW, lambda model, mesh: zero.parallelize(model, mesh["dp"], 3),
        setting.mesh(comm, "dp"), [setting.words(ROWS, t, ragged=True) for t in range(2)],
        equip=equip, max_norm=0.5), "the same training")


def equip(optimizer, model, mesh):
    """Offload as the command does."""
    return offload.attach(parallel.equip(optimizer, model), model, offload.Host, mesh.world, CHUNK)


def momentum(params):
    return setting.optim.SGD(params, lr=0.1, momentum=0.9)


@kit.breaks(offload, "pass_by")
def overwritten(chunks, buffers, get, put, submit):
    """Both neighbours share one buffer: the next chunk arrives in the one that is being updated.

    What goes back is a mixture. The loss falls, with moments of other parameters."""
    yield from overwritten.original(chunks, [buffers[0]] * 2, get, put, submit)


@kit.breaks(offload, "pass_by")
def stale(chunks, buffers, get, put, submit):
    """The last chunk is not taken back: its state stays one step behind, in each step.

    Nothing is waited for, so nothing is missed: a step ends before the thread does."""
    def not_the_last(fn, chunk, buffer):
        lost = fn is put and chunk is chunks[-1]
        return submit(nothing if lost else fn, chunk, buffer)
    yield from stale.original(chunks, buffers, get, put, not_the_last)


def nothing(chunk, buffer):
    """Move nothing."""


@kit.breaks(offload, "pass_by")
def one_at_a_time(chunks, buffers, get, put, submit):
    """Each chunk is brought, updated and taken back before the next one is sent for.

    All numbers are right; the step takes the time of both, one after the other."""
    for chunk in chunks:
        submit(get, chunk, buffers[0]).result()
        yield chunk, buffers[0]
        submit(put, chunk, buffers[0]).result()


@kit.breaks(offload, "attach")
def all_at_once(optimizer, model, make_tier, comm=None, chunk=0):
    """One chunk holds everything: two buffers of it are twice what was to be saved.

    All numbers are right; only who counts what is here sees that nothing was gained."""
    return all_at_once.original(optimizer, model, make_tier, comm, 1 << 30)


@kit.breaks(offload.Piece, "__array__")
def remembered(self, dtype=None, copy=None):
    """Pieces of parameters are read once and kept, as if they did not change.

    Forward and backward compute with the parameters of the first step."""
    if not hasattr(self, "kept"):
        self.kept = remembered.original(self)
    return self.kept


def bars(figure, found, names):
    """Stack what lies here and elsewhere."""
    axes = figure.subplots()
    axes.bar(names, [row[0] / 1e6 for row in found], label="elsewhere")
    axes.bar(names, [row[3] / 1e6 for row in found], label="two chunks, here")
    axes.set(ylabel="MB of optimizer state and parameters", title="what a rank keeps where")
    axes.legend()


TAKEAWAY = "What is used once per step may lie elsewhere, if a step has enough tokens to hide it."
FIELD = "DeepSpeed ZeRO-Offload and ZeRO-Infinity; torch FSDP2 CPUOffloadPolicy"
TRY = ["at how many tokens is GPT-3's step free with NVMe on 1024 GPUs?"]
SCREENS = [two_bandwidths, two_buffers, flops_per_byte, what_is_here, prove, overwritten]

if __name__ == "__main__":
    kit.run(SCREENS)
