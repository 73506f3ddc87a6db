"""Turn a run's configuration into processes: flags, commands, grids of runs, Slurm.

* ``command``       the command that starts a run, and the parser of its ``--pipemem-*`` flags
* ``cut_flags``     the training script's flags that cut a model
* ``feasibility``   whether a run can work, as far as that is known without a device
* ``slurm``         jobs of a run and of a grid's points
* ``grid``          many runs that differ in a few keys
"""
