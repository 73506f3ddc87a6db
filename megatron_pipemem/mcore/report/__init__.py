"""What a run did, against what was predicted."""
