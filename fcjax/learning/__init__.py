"""Models, local data, local updates, aggregation and evaluation."""
