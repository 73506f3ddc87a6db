"""Let each rank begin a training step before other ranks have ended the previous one."""
