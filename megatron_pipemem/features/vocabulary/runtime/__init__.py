"""Compute an input embedding, and an LM head with its cross entropy, that are cut by rows over the ranks of a group.

Each phase computes only on its own rank. Between phases, the caller starts collectives with the functions of
``collectives``. So a schedule can place each of them as an action. ``docs/vocabulary.md`` has the equations and the
order.
"""
