"""Advise a schedule for a run, from its launch script, and write the flags to paste."""
