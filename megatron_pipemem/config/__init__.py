"""Describe a run: a model, a cluster, how the one is cut over the other, and the YAML files that say so.

* ``loading``     YAML files into typed, frozen dataclasses; ``models/`` and ``clusters/`` ship with the package
* ``model``       the shape of a model: parameters, FLOPs
* ``cluster``     machines: memory, speed, links
* ``runs``        a model on a cluster under a schedule
* ``layout``      layers per stage in Megatron's words
"""
