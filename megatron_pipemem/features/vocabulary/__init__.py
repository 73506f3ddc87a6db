"""Cut the input embedding and the LM head over pipeline ranks (Vocabulary Parallelism, arXiv 2411.05288)."""
