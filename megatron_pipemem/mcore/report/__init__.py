"""Report what a run did, against what was predicted."""
