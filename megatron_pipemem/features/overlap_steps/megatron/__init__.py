"""Let steps follow each other without a barrier between them."""
