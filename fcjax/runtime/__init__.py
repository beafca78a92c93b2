"""Infrastructure that is independent of federated learning: hardware, clusters, programs, files and progress."""
