"""``pipemem plan``: every way to run a model on a cluster, priced, and the best of them.

* ``prices``     what a layer, the embedding and the head take on one rank, messages included
* ``partition``  which layers go to which stage
* ``step``       a run on a placement: costs of stages, bytes of ranks, what a step takes beside its schedule
* ``memory``     whether a run as configured fits its devices
* ``space``      what there is to choose from
* ``replay``     one order under many costs
* ``variants``   what runs can do beside computing in another order
* ``planning``   the search
* ``layout``     layers per stage in Megatron's words
* ``output``     a plan as a run configuration and as JSON
"""
