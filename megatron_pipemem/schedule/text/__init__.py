"""Read and write schedules and costs as files that people and other programs write."""
