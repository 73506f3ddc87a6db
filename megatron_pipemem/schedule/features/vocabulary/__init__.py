"""Describe vocabulary parallelism (arXiv 2411.05288) as data: head and embedding cut over the devices, as passes of the
schedule.
"""
