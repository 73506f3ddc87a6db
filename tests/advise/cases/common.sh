# Flags that the scripts of this folder share. They read it with `source`.
declare -a COMMON=(--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
  --micro-batch-size 1 --bf16 --vocab-size 32000)
