"""The choice of a schedule for a request: for runs, the command line and the planner."""
