"""What to run: shapes of models and machines, what their layers cost, and which configuration is fastest.

* ``loading``         YAML files into typed, frozen dataclasses
* ``model``           the shape of a model: parameters, FLOPs
* ``cluster``         a machine park: memory, speed, links
* ``activations``     the bytes a microbatch keeps, by what needs them
* ``offload_ratio``   the time activations take to the host and back, over the time they are computed with
* ``profile``         what layers cost, measured or modelled, and the costs of stages made of them
"""
