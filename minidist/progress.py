"""What a training run shows of itself: a line while it runs, a curve when it is done.

    step    150/500   loss 2.314   validation 2.401      12,200 tokens/s   0:22 left
    recorded in History     shown by Progress     drawn by draw

Lesson: python -m lessons.step
"""
import time
from dataclasses import dataclass, field

from minidist import placement
from minidist.ranks import environment


@dataclass
class History:
    """Record what training did."""
    losses: list = field(default_factory=list)              # one per optimizer step
    val_losses: list = field(default_factory=list)
    val_steps: list = field(default_factory=list)           # optimizer steps taken before each
    tokens: int = 0
    seconds: float = 0.0                                    # in training steps alone
    skipped: int = 0                                        # steps, by a loss scale
    trouble: str = ""                                       # why it could not go on to the end

    def add(self, step, seconds):
        """Record one training step and how long it took."""
        self.losses.append(step.loss)
        self.tokens += step.count
        self.seconds += seconds
        self.skipped += int(step.skipped)

    def validated(self, loss):
        """Record a validation after the steps taken so far."""
        self.val_losses.append(loss)
        self.val_steps.append(len(self.losses))

    @property
    def tokens_per_s(self):
        return self.tokens / self.seconds if self.seconds else 0.0


class Progress:
    """Show how far training is: one moving line on a terminal, else a line per validation."""

    def __init__(self, steps, show=True):
        self.steps, self.began = steps, time.perf_counter()
        terminal = environment.on_terminal()
        self.moving, self.lines = show and terminal, show and not terminal

    def line(self, history):
        done = len(history.losses)
        left = (time.perf_counter() - self.began) * (self.steps - done) / max(done, 1)
        loss = f"{history.losses[-1]:.3f}" if done else "    -"
        rate = f"{history.tokens_per_s:>9,.0f} tokens/s   {clock(left)} left" if done else ""
        rate += f"   {history.skipped} skipped" if history.skipped else ""
        return (f"step {done:>6}/{self.steps}   loss {loss}   validation "
                f"{history.val_losses[-1]:.3f}   {rate}").rstrip()

    def move(self, history):
        """Show a step, where a line can move."""
        if self.moving:
            print(f"\r{self.line(history)}\x1b[K", end="", flush=True)

    def mark(self, history):
        """Show a step in any case."""
        self.move(history)
        if self.lines:
            print(self.line(history))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.moving:
            print()                         # whatever follows, an error too, gets its own line


def clock(seconds):
    """Write a duration.  75 -> '1:15'"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def audit(params):
    """Write down how every parameter of this rank lies: cut, or held whole by all."""
    table = [("parameter", "whole", "on a rank", "cut over"), *placement.audit(params)]
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip()
                     for row in table)


def draw(figure, history):
    """Draw training and validation loss over steps."""
    axes = figure.subplots()
    axes.plot(range(1, len(history.losses) + 1), history.losses, lw=0.8, label="training")
    axes.plot(history.val_steps, history.val_losses, "o-", label="validation")
    axes.set(xlabel="optimizer step", ylabel="loss per character (nats)")
    axes.legend()


def report(o, history, verdict=None, text=None, fingerprint=None):
    """Collect what was printed, as data."""
    return {"losses": history.losses, "val_losses": history.val_losses, "skipped": history.skipped,
            "val_steps": history.val_steps, "tokens_per_s": history.tokens_per_s,
            "verdict": verdict and verdict.line(), "sample": text,
            "parameters_sha256": fingerprint, "trouble": history.trouble,
            "flags": {k: v for k, v in o._asdict().items() if k not in ("out", "json", "found")}}
