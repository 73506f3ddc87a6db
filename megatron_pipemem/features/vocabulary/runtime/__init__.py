"""Shard the input embedding and the LM head with its cross entropy over the vocabulary, across the ranks of one process
group.

Every phase is local compute; the collectives between phases are functions of ``collectives`` that the caller issues, so that
a schedule can place each of them as an action of its own. See ``docs/vocabulary.md`` for the maths and the order.
"""
