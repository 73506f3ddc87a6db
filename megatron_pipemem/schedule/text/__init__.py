"""Schedules and costs as files that people and other programs write."""
