"""PyTorch's DistributedDataParallel, fully_shard or pipelining over gloo: one rank of a job.

On the GPT of tests/twin.py. The opponent in `python -m minidist.bench train`, which starts one
process per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints the seconds of
each step.
"""
import json
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from minidist.bench import train as bench_train
from minidist.engine import gpt
from minidist.pp import deal
from tests.twin import Twin


class Part(torch.nn.Module):
    """Some of the twin's parameters as a module, so that PyTorch can spread and gather them."""

    def __init__(self, twin, names):
        super().__init__()
        self.twin, self.names = twin, {name: name.replace(".", "_") for name in names}
        for name, field in self.names.items():
            setattr(self, field, torch.nn.Parameter(twin.params[name].detach().clone()))
        self.hand_out()

    def hand_out(self):
        """Give the twin the parameters as they are now: whole, or this rank's pieces."""
        self.twin.params.update({name: getattr(self, f) for name, f in self.names.items()})

    def forward(self, run, *args):
        self.hand_out()
        return run(*args)


class Net(Part):
    """The twin as a module: one Part for each block, and itself for the rest."""

    def __init__(self, twin):
        blocks = [[name for name in twin.params if name.startswith(f"blocks.{i}.")]
                  for i in range(twin.config.layers)]
        super().__init__(twin, [name for name in twin.params if not name.startswith("blocks.")])
        self.blocks = torch.nn.ModuleList(Part(twin, names) for names in blocks)

    def forward(self, batch):
        return super().forward(self.twin.loss, batch,
                               lambda x, i: self.blocks[i](self.twin.block, x, i))


def spread(net, stage):
    """Spread the twin as --zero says.  PyTorch has no stage 1 for a model that is called whole"""
    if stage < 2:
        return DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard
    for part in [*net.blocks, net]:
        fully_shard(part, reshard_after_forward=stage == 3)
        part.hand_out()
    return net


class Stage(Part):
    """Some consecutive blocks of the twin, with the embedding before or the head behind them.

    Tied to the head, the token embedding is on both ends, and its gradients are added up."""

    def __init__(self, twin, rank, ranks):
        first, last = rank == 0, rank == ranks - 1
        layers, tied = deal(twin.config.layers, ranks)[rank], "head.out.weight" not in twin.params
        mine = [f"blocks.{i}." for i in layers] + ["embed."] * first + ["head."] * last
        mine += ["embed.wte."] * (tied and last)
        names = [name for name in twin.params if name.startswith(tuple(mine))]
        super().__init__(twin, names)
        twin.params = {name: twin.params[name] for name in names}
        self.first, self.last, self.layers = first, last, layers
        self.ends = distributed.new_group([0, ranks - 1]) if tied else None

    def forward(self, x):
        if self.first:
            x = self.twin.embed(x, torch.arange(x.shape[1]))
        for i in self.layers:
            x = self.twin.block(x, i)
        return self.twin.head(x) if self.last else x

    def finish(self):
        if self.ends is not None and (self.first or self.last):
            distributed.all_reduce(self.twin.params["embed.wte.weight"].grad, group=self.ends)


def pipeline(twin, args, rank, ranks):
    """Cut the twin into stages.  -> a function that leaves a batch's gradients"""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    stage, count = Stage(twin, rank, ranks), [1]
    make = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
    schedule = make(
        PipelineStage(stage, rank, ranks, torch.device("cpu")), args.microbatches,
        lambda logits, targets: twin.score(logits, targets) / count[0], scale_grads=False)

    def passes(batch):
        count[0] = batch.count
        given = (torch.as_tensor(batch.tokens),) if stage.first else ()
        schedule.step(*given, target=torch.as_tensor(batch.targets) if stage.last else None,
                      return_outputs=False)
        stage.finish()

    return passes


def replica(twin, args, rank, ranks):
    """Spread the twin over replicas.  -> a function that leaves a batch's gradients"""
    model = spread(Net(twin), args.zero or 0)

    def passes(batch):
        mine = batch.split(ranks)[rank]
        (model(mine) / mine.count).backward()

    return passes


def main():
    args = bench_train.parser().parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    config, batches = bench_train.task(args)
    twin = Twin(gpt.GPT(config), fused=True)
    passes = (pipeline if (args.pp or 1) > 1 else replica)(twin, args, rank, ranks)
    optimizer, laps = twin.adamw(1e-4), []
    for batch in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        passes(batch)
        optimizer.step()
        laps.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps(laps[1:]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
