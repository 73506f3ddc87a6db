"""Grids: many runs that differ in a few keys. Describe, check, start, resume and compare them.

A *point* is one run of a grid.

* ``points``      read a grid's file, and make the runs of its points
* ``store``       the grid's folder, with a configuration and a result per point
* ``local``       start points on this machine
* ``comparison``  compare throughput and peak memory of the points
"""
