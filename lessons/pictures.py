"""Pictures that several lessons draw on an empty matplotlib figure."""
import numpy as np

from minidist import trace

KINDS = "P  parameters", "O  optimizer state", "G  gradients", "A  activations"


def memory(figure, runs):
    """What a step holds, event by event, one panel per run.  {title: ledger.over_step's events}"""
    for axes, (title, events) in zip(figure.subplots(1, len(runs), sharey=True, squeeze=False)[0],
                                     runs.items()):
        phases, held = zip(*events)
        params, grads, state, kept = np.array(held).T / 1e6
        axes.stackplot(range(len(held)), params, state, grads, kept, step="post", labels=KINDS)
        axes.axvline(phases.index("backward"), color="black", linewidth=0.8)
        for phase in ("forward", "backward"):
            axes.annotate(" " + phase, (phases.index(phase), 0.96),
                          xycoords=("data", "axes fraction"))
        axes.set(title=title, xlim=(0, len(held) - 1),
                 xlabel="one event: a part of the model, or one more gradient")
    axes = figure.axes[0]
    axes.set(ylabel="MB held", ylim=(0, 1.12 * axes.get_ylim()[1]))
    axes.legend(loc="upper right")


def timelines(figure, lanes, title):
    """When each lane waits for the wire.  {name: (seconds, [(color, label, [(start, end)])])}"""
    axes = figure.subplots()
    for y, (took, waits) in enumerate(lanes.values()):
        axes.broken_barh([(0, 1e3 * took)], (y - 0.4, 0.8), color="lightgray")
        for color, label, spans in waits:
            axes.broken_barh([(1e3 * start, 1e3 * (end - start)) for start, end in spans],
                             (y - 0.4, 0.8), color=color, label=label if y == 0 else None)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set(xlabel="ms of one step; gray: computing", title=title)
    axes.legend(loc="lower right")


def traces(figure, lines):
    """What two ranks compute and send, one panel per form of a step.  {name: spans}"""
    end = max(map(trace.length, lines.values()))
    for axes, (name, spans) in zip(figure.subplots(len(lines), 1, sharex=True), lines.items()):
        trace.draw(axes, spans)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlim(0, 1e3 * end)
    axes.set_xlabel("milliseconds     blue: forward   orange: backward   green: messages under way")
