# No vocabulary, and devices of mpirun.
RANKS=64
mpirun -np $RANKS --npernode 8 python pretrain_gpt.py --num-layers 32 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \
  --micro-batch-size 1 --global-batch-size 128 --pipeline-model-parallel-size 8 --tokenizer-type Llama2Tokenizer --bf16
