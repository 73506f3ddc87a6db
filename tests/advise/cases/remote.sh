source ./common.sh
launch() { /opt/env/bin/torchrun "$@" > log.txt 2>&1; }
ssh node1 "cd job; $(declare -f launch); launch --nproc-per-node 8 --nnodes 2 pretrain_gpt.py ${COMMON[*]} --num-layers 16 \
  --global-batch-size 32 --pipeline-model-parallel-size 2" &
wait
