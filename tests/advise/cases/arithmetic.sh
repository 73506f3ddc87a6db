# Statements and expressions of arithmetic, with other bases, powers and conditions.
source ./common.sh
layers=16
((layers += 8)); let layers*=2
pp=$(( layers > 40 ? 2**2 : 0x10 ))
extra=""
if [ $(( $pp > 2 )) -eq 1 ]; then extra="--tp-comm-overlap"; fi
torchrun --nproc-per-node 8 pretrain_gpt.py ${COMMON[@]} --num-layers $layers --global-batch-size $(expr 8 \* 4) \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size $pp $extra
