"""From a request to a schedule: for runs, the command line and the planner."""
