"""Recorder: what every rank did in one step of a training, beside the plan of its pipeline.

    rank 1   compute         | F0 | B0 | F1 | B1 | rest |      forward, backward, reduce and update
             plan            | F0 | B0 | F1 | B1 |             minidist.simulate, with mean times
             wire       |--|    |--|                           messages, while they were under way

Run:    mpirun -n 2 python -m minidist.train --pp 2 --steps 5 --trace out/trace.json
Lesson: python -m lessons.schedules
"""
import time
from contextlib import contextmanager
from statistics import fmean

from minidist import simulate
from minidist.mesh import notes
from minidist.ranks.counting import Event
from minidist.trace import Span, wire


class Recorder:
    """Note what this rank does in a step; the last one noted is kept."""

    def __init__(self, model, mesh):
        self.mesh, self.schedule, self.actions = mesh, None, []
        self.events, self.ends = [], (0.0, 0.0)
        pipeline = getattr(model, "pipeline", None)
        self.passes = None if pipeline else self.one_by_one
        if pipeline:
            pipeline.listeners.append(self.acted)

    def acted(self, run, action, start, end):
        """Hear of an action of a pipeline."""
        self.schedule = run.schedule
        self.actions.append((action, start, end))

    def one_by_one(self, model, batches):
        """Run forward and backward on each micro-batch, as step.accumulate does.  -> loss sum"""
        loss = 0.0
        for i, batch in enumerate(batches):
            times = [time.perf_counter()]
            out = model(batch)
            times.append(time.perf_counter())
            out.backward()
            times.append(time.perf_counter())
            loss += out.item()
            self.actions += [(("F", i, 0), *times[:2]), (("B", i, 0), *times[1:])]
        return loss

    @contextmanager
    def step(self):
        """Note the training step inside the block, in the place of the one before."""
        self.actions.clear()
        start = time.perf_counter()
        with self.mesh.world.recording() as self.events:
            yield
        self.ends = start, time.perf_counter()

    def spans(self):
        """Gather the last step of all ranks.  Collective  -> list of Spans"""
        mine = [self.mesh.coords, self.ends, self.actions,
                [list(vars(event).values()) for event in self.events]]
        ranks = notes(mine, self.mesh.world)
        found = wire([Event(*values) for *_, events in ranks for values in events])
        for rank, (_, (start, end), actions, _) in enumerate(ranks):
            found += [Span(rank, "compute", self.name(action), *times)
                      for action, *times in actions]
            last = max((end for *_, end in actions), default=start)
            found.append(Span(rank, "compute", "rest", last, end))
        return found + (self.planned(ranks) if self.schedule else [])

    def name(self, action):
        return simulate.name(self.schedule, action) if self.schedule else "{}{}".format(*action)

    def planned(self, ranks):
        """Lay the schedule out with the mean times of all ranks, from each pipeline's start on."""
        taken, starts, s = {}, {}, self.schedule
        where = [str(coords | {"pp": 0}) for coords, *_ in ranks]            # which pipeline's
        for pipeline, (_, _, actions, _) in zip(where, ranks):
            starts[pipeline] = min(starts.get(pipeline, actions[0][1]), actions[0][1])
            for (kind, _, _), start, end in actions:
                taken.setdefault(kind, []).append(s.v * (end - start))
        mean = {kind: fmean(times) for kind, times in taken.items()}
        halves = {kind: mean.get(kind) or mean["B"] / 2 for kind in "IW"}
        plan = simulate.cost(s, mean["F"], **halves)
        return [Span(rank, "plan", simulate.name(s, action), starts[pipeline] + start,
                     starts[pipeline] + end)
                for rank, (pipeline, (coords, *_)) in enumerate(zip(where, ranks))
                for action, start, end in plan.spans[coords["pp"]]]
