#!/bin/bash
# Two torchrun agents on this machine stand for two nodes of two processes each:
#
#     examples/multinode/here.sh [--max-steps 20 ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${BIN:-.venv/bin}
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
for node in 0 1; do
    "$bin/torchrun" --nnodes 2 --nproc-per-node 2 --node-rank "$node" --master-addr 127.0.0.1 \
        --master-port "${PORT:-29431}" examples/multinode/train.py --nodes 2 --devices 2 --accelerator cpu "$@" &
done
wait
