"""Describe a run: a model, a cluster, how the one is cut over the other, and the YAML files that say so.

* ``loading``     YAML files into typed, frozen dataclasses; ``models/`` and ``clusters/`` ship with the package
* ``values``      bounds and types of the values in these files
* ``model``       the shape of a model: parameters, FLOPs
* ``cluster``     machines: memory, speed, links
* ``runs``        a model on a cluster under a schedule
* ``layout``      layers per stage in Megatron's words, layouts and hybrid patterns
* ``refusals``    options of Megatron that do not go with a feature
"""
