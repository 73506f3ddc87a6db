"""Write down, plan, start, resume and compare many runs that differ in a few keys.

* ``config``   a grid's file, and the runs it stands for
* ``store``    its folder: one run file and one result per point
* ``results``  what a point's log and report say
* ``local``    starts points on this machine
* ``slurm``    starts points as an array job
"""
