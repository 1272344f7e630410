#!/bin/bash
# The same without SLURM: on each node, with the same address of the first one.
#
#     examples/slurm/torchrun.sh NODES DEVICES FIRST_NODE:PORT COMMAND.py ARGUMENTS...
#
# torchrun sets ranks and addresses, Lightning finds them in the environment. DEVICES must equal the Trainer's devices,
# NODES its num_nodes. For `osdp fit`, the command is `-m lightning_osdp fit --config fit.yaml ...`.
set -euo pipefail
nodes=${1:?usage: torchrun.sh NODES DEVICES FIRST_NODE:PORT COMMAND...} devices=${2:?} first=${3:?}
shift 3
exec torchrun --nnodes "$nodes" --nproc-per-node "$devices" --rdzv-backend c10d --rdzv-endpoint "$first" \
    --rdzv-id "${RUN_ID:-osdp}" "$@"
