# Not the first arm: bash takes the second.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case ${SIZE:-large} in
  small) layers=8 tp=1 pp=2 ;;
  large) layers=48 tp=4 pp=8 ;;
esac
torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py "${COMMON[@]}" --num-layers $layers --global-batch-size 64 \
  --tensor-model-parallel-size $tp --pipeline-model-parallel-size $pp
