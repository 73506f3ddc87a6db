"""Add to a schedule what it can do beside computing in an order: offload, recomputation, a cut vocabulary, several weight
versions.
"""
