"""What a schedule can do beside computing in an order: offload, recomputation, a cut vocabulary, several weight versions."""
