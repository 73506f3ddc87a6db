"""From the launch script of a run to the schedule that makes it faster or smaller, and the line to paste."""
