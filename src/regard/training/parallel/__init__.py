"""Training on many processes, started by `torchrun`, through torch.distributed: gloo on CPUs, NCCL on GPUs."""
