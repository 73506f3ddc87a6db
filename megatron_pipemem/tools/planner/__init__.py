"""Predict the time and memory of every way to run a model on a cluster, and find the best (``pipemem plan``).

* ``activations``     the bytes that a microbatch keeps, tensor by tensor
* ``profile``         measured or modelled costs of the parts of a model, from which stages are priced
* ``prices``          seconds and bytes of a layer, the embedding and the head on one rank; the offload ratio
* ``step``            a run on a placement: costs of stages, bytes of ranks, seconds outside the schedule
* ``memory``          the memory of a run as configured
* ``space``           all choices of the planner
* ``slices``          runs whose microbatches are cut into slices
* ``replay``          the time of one order of passes under many costs
* ``variants``        offload, vocabulary parallelism and other variants of runs
* ``pareto``          bubble and peak memory of all schedules of a pipeline (``pipemem pareto``)
* ``pricing``         one run with its parallel sizes, as it stands and under other schedules (``pipemem advise``)
* ``balance``         the layers per stage with which one schedule is fastest (``pipemem layout``)
* ``descent``         moves of layers between stages
* ``explanation``     the time of a measured step by cause (``pipemem explain``)
* ``planning``        the search
* ``ways``            a way to run a model, the answer of ``plan``, ``layout`` and ``advise``; as a run file and as JSON
"""
