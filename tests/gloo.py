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


class Net(torch.nn.Module):
    """The twin as a module, so that DistributedDataParallel can find its parameters."""

    def __init__(self, twin):
        super().__init__()
        self.twin = twin
        for name, p in twin.params.items():
            twin.params[name] = torch.nn.Parameter(p.detach().clone())
            self.register_parameter(name.replace(".", "_"), twin.params[name])

    def forward(self, batch):
        return self.twin.loss(batch)


def main():
    args = bench_train.parser().parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    _, config, batches = bench_train.setting(args)
    net = Net(Twin(gpt.GPT(config), fused=True))
    model, optimizer, laps = DistributedDataParallel(net), net.twin.adamw(1e-4), []
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
