"""Choose the schedule for a request. Runs, the command line and the planner all use this package."""
