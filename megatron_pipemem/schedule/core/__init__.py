"""Describe schedules as data: actions, placements, orders, costs, and what follows from them."""
