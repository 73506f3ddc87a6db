"""Plan with the schedule which activations spend the time between forward and backward in host memory."""
