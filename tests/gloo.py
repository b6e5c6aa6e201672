"""PyTorch's DistributedDataParallel over gloo, on the GPT of tests/twin.py: one rank of a job.

The opponent in `python -m minidist.bench train`, which starts one process per rank with RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints the seconds of each step.
"""
import json
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from minidist.bench import train as bench_train
from minidist.engine import gpt
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


def main():
    args = bench_train.parser().parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    _, config, batches = bench_train.setting(args)
    net = Net(Twin(gpt.GPT(config), fused=True))
    model = spread(net, args.zero or 0)
    optimizer, laps = net.twin.adamw(1e-4), []
    for batch in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        mine = batch.split(ranks)[rank]
        (model(mine) / mine.count).backward()
        optimizer.step()
        laps.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps(laps[1:]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
