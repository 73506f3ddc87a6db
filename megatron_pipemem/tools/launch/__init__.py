"""Turn a run's configuration into processes: flags, commands, grids of runs, Slurm.

* ``asking``        values from a separate process that imports Megatron
* ``command``       the command that starts a run, and the parser of its ``--pipemem-*`` flags
* ``cut_flags``     the training script's flags that cut a model
* ``feasibility``   checks of a run that need no GPU, before it starts
* ``slurm``         Slurm jobs for a run, and for the points of a grid
* ``kubernetes``    a run as a job for Kubernetes
* ``grid``          many runs that differ in a few keys
"""
