"""Describe a training run: a model, a cluster, the parallelism and the schedule, and the YAML files that give them.

* ``loading``         YAML files into typed, frozen dataclasses; ``models/`` and ``clusters/`` ship with the package, and
                     so do the shapes of public models by their names on Hugging Face
* ``values``          limits and types of the values in these files
* ``model``           the shape of a model, and the settings that decide the costs of a microbatch
* ``cluster``         machines: memory, speed, links
* ``runs``            a model on a cluster under a schedule
* ``layout``          layers of each stage in Megatron's notation, layouts and hybrid patterns
* ``refusals``        options of Megatron that exclude a feature of this package
"""
