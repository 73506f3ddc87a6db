"""Draw random numbers by layer and microbatch, so that dropout does not depend on the schedule."""
