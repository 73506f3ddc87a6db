"""A page on which users change schedules, sizes and prices, and see time and memory at once."""
