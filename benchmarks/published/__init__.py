"""Steps of published code, for benchmarks that compare predictions with its measurements."""
