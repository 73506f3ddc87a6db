"""Cut the input embedding and the LM head with its cross entropy over the vocabulary, across the ranks of one group.

Every phase is local compute. The caller issues the collectives between phases with the functions of ``collectives``, so that
a schedule can place each as an action. See ``docs/vocabulary.md`` for the maths and the order.
"""
