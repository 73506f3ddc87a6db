"""Drop activations after the forward, and compute them again before the backward."""
