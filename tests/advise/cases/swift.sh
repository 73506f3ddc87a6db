NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 4 --pipeline_model_parallel_size 2 \
  --expert_model_parallel_size 4 --global_batch_size 16 --max_length 4096
