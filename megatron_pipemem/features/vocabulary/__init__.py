"""Cut the embedding and the head over all pipeline ranks (Vocabulary Parallelism, 2411.05288)."""
