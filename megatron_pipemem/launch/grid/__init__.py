"""Write down, plan, start, resume and compare many runs that differ in a few keys.

* ``points``      a grid's file, and the runs of its points
* ``store``       the grid's folder: a run file and a result per point
* ``local``       starts points on this machine
* ``comparison``  throughput and peak memory of the points
"""
