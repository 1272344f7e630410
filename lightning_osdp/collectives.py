import torch, torch.distributed as dist
def all_reduce_async(t, group): return dist.all_reduce(t, group=group, async_op=True)
def all_gather(out, shard, group): dist.all_gather_into_tensor(out, shard, group=group)
def reduce_scatter(out, whole, group): dist.reduce_scatter_tensor(out, whole, group=group)
