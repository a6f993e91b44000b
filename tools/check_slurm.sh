#!/bin/bash
# The Slurm script of docs/scaling.md on a cluster of two nodes that are both this machine: it is stopped by a signal, requeued,
# and resumed to its end. Needs root, g2rpo on the path, and on Debian `apt-get install slurm-wlm munge`; takes some minutes.
# usage: tools/check_slurm.sh FOLDER      (an empty folder for the cluster, the job and the run)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd) folder=$(realpath "$1") host=$(hostname -s)
mkdir -p "$folder/state" && cd "$folder"
export SLURM_CONF=$folder/slurm.conf
cat > slurm.conf <<END
ClusterName=two
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES State=UP
END
stop() { for file in *.pid; do kill "$(cat "$file")" 2> /dev/null || true; done; }
trap stop EXIT
munge -n > /dev/null 2>&1 || { install -d -o munge /run/munge && su -s /bin/sh munge -c munged; }
slurmctld && slurmd -N n1 && slurmd -N n2

small="scenes trainer.prompts_per_iteration=4 trainer.iterations=40 algorithm.group_size=2 algorithm.branch_steps=[0]"
small+=" sampling.num_steps=4 evaluation.num_prompts=4 evaluation.every=1000 policy.device=cpu trackers=[]"
sed -n '/^#!\/bin\/bash/,/^```/{/^```/!p}' "$root/docs/scaling.md" \
  | sed -e 's/--ntasks-per-node=8 --gpus-per-node=8/--ntasks-per-node=2/' -e 's/^export MASTER_ADDR=\S*.* MASTER_PORT/export MASTER_ADDR=127.0.0.1 MASTER_PORT/' \
    -e "s|^run=.*|run=$folder/run|" -e "s|flux1-dev-lora|$small|" > job.sh
grep -q "$folder/run" job.sh && grep -q "scenes" job.sh && grep -q MASTER_ADDR=127 job.sh
export PYTHONPATH=$root/src OMP_NUM_THREADS=1
job=$(sbatch --parsable --output=job.log --open-mode=append job.sh)
rows() { { grep -c '"train"' run/metrics.jsonl || true; } 2> /dev/null; }
state() { scontrol show job "$job" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'; }
until [ "$(rows)" ] && [ "$(rows)" -ge 5 ]; do
  sleep 2
  case $(state) in FAILED | COMPLETED) cat job.log && exit 1 ;; esac
done
scancel --signal=TERM "$job"                     # what --signal sends when time runs out
until [ "$(state)" = COMPLETED ]; do
  sleep 5
  [ "$(state)" != FAILED ] || { cat job.log && exit 1; }
done
grep -E "stopped after iteration|resuming after iteration" job.log
[ "$(rows)" = 40 ] && echo "the job was stopped, requeued, resumed, and made each of its 40 iterations once"
