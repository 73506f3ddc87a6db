"""Price every way to run a model on a cluster, and find the best of them (``pipemem plan``).

* ``counts``          parameters and FLOPs of layers, block by block; layers weighed against each other
* ``activations``     the bytes a microbatch keeps, by what needs them
* ``profile``         what layers cost, measured or modelled, and the costs of stages made of them
* ``prices``          what a layer, the embedding and the head take on one rank, messages included; the offload ratio
* ``partition``       which layers go to which stage
* ``step``            a run on a placement: costs of stages, bytes of ranks, what a step takes beside its schedule
* ``memory``          whether a run as configured fits its devices
* ``space``           what there is to choose from
* ``replay``          one order under many costs
* ``variants``        what runs can do beside computing in another order
* ``balance``         the layers per stage with which one schedule is fastest (``pipemem layout``)
* ``changes``         what a run could do otherwise, by its own measured times
* ``explanation``     where the time of a measured step went (``pipemem explain``)
* ``planning``        the search
* ``plans``           a plan as a run configuration and as JSON
"""
