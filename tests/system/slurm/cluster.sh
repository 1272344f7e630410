#!/bin/bash
# A real SLURM of two nodes on this machine, as root and without systemd: cluster.sh up FOLDER, cluster.sh down FOLDER.
# Needs Debian's packages slurm-wlm and munge. Writes one marked line into /etc/hosts and takes it out again.
set -euo pipefail
action=${1:?usage: cluster.sh up|down FOLDER}
folder=$(realpath -m "${2:?usage: cluster.sh up|down FOLDER}")
conf=$folder/slurm.conf
mark="# two nodes of the SLURM test"

down() {
    local pids=() file
    for file in "$folder"/run/*.pid; do
        [ -e "$file" ] && pids+=("$(cat "$file")")
    done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    # They write into the folder until they are gone.
    for pid in "${pids[@]}"; do
        timeout 30 tail --pid="$pid" -f /dev/null || { echo "process $pid did not end" >&2; kill -9 "$pid" || true; }
    done
    # Over the same file: where it is mounted, as in containers, it can't be replaced.
    grep -v "$mark" /etc/hosts > "$folder/hosts" || true
    cat "$folder/hosts" > /etc/hosts
}

wait_for() { # seconds, what, command
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "$what did not come up" >&2; tail -n 5 "$folder"/log/* >&2; exit 1; }
        sleep 0.2
    done
}

all_idle() { [ "$(sinfo --noheader --format %t | sort -u)" = idle ]; }

up() {
    for program in slurmctld munged; do
        command -v $program > /dev/null || { echo "there is no $program: apt-get install slurm-wlm munge" >&2; exit 1; }
    done
    mkdir -p "$folder"/{state,log,run,spool/osdp1,spool/osdp2}
    chmod 755 "$folder"
    install -d -o munge -g munge -m 700 "$folder/munge"
    [ -s /etc/munge/munge.key ] || { dd if=/dev/urandom bs=1 count=1024 of=/etc/munge/munge.key 2>/dev/null
        chown munge: /etc/munge/munge.key; chmod 400 /etc/munge/munge.key; }
    chmod 711 "$folder/munge"
    runuser -u munge -- munged --socket="$folder/munge/socket" --pid-file="$folder/munge/pid" \
        --log-file="$folder/munge/log" --seed-file="$folder/munge/seed"
    wait_for 20 munged test -S "$folder/munge/socket"
    cp "$folder/munge/pid" "$folder/run/munged.pid"
    grep -q "$mark" /etc/hosts || echo "127.0.0.1 osdp1 osdp2 $mark" >> /etc/hosts
    host=$(hostname -s)
    # cred_expire: a requeued job otherwise waits two minutes. Ports of our own, beside any other SLURM.
    cat > "$conf" << CONF
ClusterName=osdp
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17100
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
NodeName=osdp1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17101 CPUs=2 State=UNKNOWN
NodeName=osdp2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17102 CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=osdp1,osdp2 Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$conf
    slurmctld -i -f "$conf"
    slurmd -N osdp1 -f "$conf"
    slurmd -N osdp2 -f "$conf"
    wait_for 30 "the two nodes" all_idle
    sinfo --Node
}

case $action in
    up) trap 'down' ERR; up ;;
    down) down ;;
    *) echo "cluster.sh up|down FOLDER" >&2; exit 2 ;;
esac
