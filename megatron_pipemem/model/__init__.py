"""Describe a model: its sizes, its layers and their weights of time, and its stages by the flags that cut it."""
