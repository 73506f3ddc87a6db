"""Begin a step before all ranks have ended the one before."""
