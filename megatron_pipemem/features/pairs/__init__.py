"""Forwards and backwards that run together: one computes while the tokens of the other travel between experts."""
